"""Any sample again: what a run records of its steps, steps that are run again, and where two runs differ.

records     what is kept of a step, and its file
recorder    writes it while a run trains
compare     the first difference between two runs, and its cause
command     specactor replay, specactor diff
"""
