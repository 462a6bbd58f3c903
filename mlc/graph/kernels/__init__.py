"""Kernels as tensor expressions: what TVM's own operators do not say in blocked layouts, or not well."""
