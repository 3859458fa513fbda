"""The parts of a sample that have no parts: tensors, arrays, numbers, texts; and the names of types in what is stored."""
