"""What `side_by_side.py` measures: the same bytes, brought by softload, by SGLang's linker, by bare calls."""
