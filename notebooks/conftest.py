"""nbval's kernels start in the environment the notebooks were built in."""

from build import fix_environment

fix_environment()
