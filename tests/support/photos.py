"""Real photographs, where they lie beside the repository."""

from pathlib import Path

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "photos"
PHOTOS = sorted(FOLDER.glob("*.JPEG"))
