"""Maps the four code folders onto the packages pagedray.kernels, .engine, .serving and .deployments."""

from setuptools import find_packages, setup

ROOTS = ("kernels", "engine", "serving", "deployments")

setup(
    # The wheel silently lacks a package that isn't listed here, while an editable install still finds it.
    packages=[f"pagedray.{root}" for root in ROOTS]
    + [f"pagedray.{root}.{package}" for root in ROOTS for package in find_packages(root)],
    package_dir={f"pagedray.{root}": root for root in ROOTS},
    package_data={"": ["py.typed", "*.yaml", "kuberay/*.yaml", "*.cu", "*.cuh", "*.c", "*.h"]},
)
