"""The one thing pyproject.toml cannot say: how the extension module is built."""

from setuptools import setup

setup(cffi_modules=["build_ffi.py:ffibuilder"])
