"""What things are: frozen records without tensors or I/O."""
