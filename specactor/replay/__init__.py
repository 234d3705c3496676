"""Any sample again: steps of a run are recorded, run again, and compared."""
