"""Package metadata. What is fragile is pinned in requirements/."""

from setuptools import find_packages, setup

setup(
    name="specactor",
    version="0.1.0",
    description="Reinforcement learning of language models with lossless speculative rollouts",
    license="Apache-2.0",
    python_requires=">=3.11,<3.13",
    packages=find_packages(include=["specactor", "specactor.*"]),
    package_data={"specactor.cpu": ["shims/*.py", "shims/*/*.py"], "specactor": ["py.typed"]},
    install_requires=[
        "hypothesis>=6",
        "math-verify>=0.9",
        "matplotlib>=3.10",
        "mbridge==0.15.1",
        "megatron-core==0.16.1",
        "msgspec>=0.22",
        "numpy",
        "packaging",
        "psutil>=7",
        "pyarrow>=20",
        "reasoning-gym==0.1.25",
        "rich>=14",
        "safetensors",
        "setproctitle",
        "sglang==0.5.23",
        "torch>=2.13",
        "transformers==5.19.0",
        "tyro==1.0.17",
        "wandb>=0.31",
        "xxhash>=3.5",
    ],
    extras_require={
        "gpu": ["transformer-engine[core_cu13]>=2.9,<2.12"],  # its part for PyTorch is compiled: requirements/gpu.txt
        "deepspeed": ["deepspeed==0.19.8"],
        "dev": ["pytest", "pytest-timeout", "pytest-xdist", "ruff", "mypy"],
    },
    entry_points={
        "console_scripts": ["specactor = specactor.cli:main"],
        "sglang.srt.plugins": ["specactor = specactor.rollout.sglang.plugin:register"],
    },
)
