"""Graph networks over molecules, of torch_geometric's layers and, where those need more than PyPI has, plain torch."""
