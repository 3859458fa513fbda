"""In place of torchvision, if there is none: for the README's examples."""
