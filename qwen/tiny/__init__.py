"""The model that ships with the package: a memorised toy of the real architecture, see `train`."""
