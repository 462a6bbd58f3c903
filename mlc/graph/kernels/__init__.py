"""Kernels as tensor expressions, where TVM's own operators do not support a blocked layout, or not efficiently."""
