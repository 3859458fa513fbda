"""In place of torchvision, where there is none: for the README's examples."""
