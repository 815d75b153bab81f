"""The linears' GEMMs for sm_90 in Gluon.

For many tokens `gemm` and, with packed weights, `packed`; for few tokens `few` and `direct`, which may quantize the
`tokens` themselves; and the epilogue they share.
"""
