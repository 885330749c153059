"""Pictures compared by blocks: what moved, changed colour or vanished counts, edges of letters do not.

A reference is a picture of the mean colours of blocks, a few kilobytes. Anti-aliasing changes the mean of a
block by little, whereas a panel, a rack or the mark of one GPU changes it by much: the tests show both.
"""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

BLOCK = 16
"""Pixels of a block, each way."""
TOLERANCE = 20
"""The difference, of 255, that a block may have in a colour."""

_BLOCKS = """async ([png, size]) => {
  const bytes = Uint8Array.from(atob(png), (byte) => byte.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], {type: "image/png"}));
  const whole = new OffscreenCanvas(image.width, image.height).getContext("2d");
  whole.drawImage(image, 0, 0);
  const pixels = whole.getImageData(0, 0, image.width, image.height).data;
  const [columns, rows] = [Math.floor(image.width / size), Math.floor(image.height / size)];
  const canvas = new OffscreenCanvas(columns, rows), small = canvas.getContext("2d");
  const means = small.createImageData(columns, rows);
  for (let at = 0; at < columns * rows; at++) {
    const sums = [0, 0, 0];
    const [left, top] = [(at % columns) * size, Math.floor(at / columns) * size];
    for (let y = top; y < top + size; y++)
      for (let x = left; x < left + size; x++)
        for (let colour = 0; colour < 3; colour++) sums[colour] += pixels[4 * (y * image.width + x) + colour];
    sums.forEach((sum, colour) => (means.data[4 * at + colour] = Math.round(sum / size ** 2)));
    means.data[4 * at + 3] = 255;
  }
  small.putImageData(means, 0, 0);
  const written = await canvas.convertToBlob({type: "image/png"});
  const coded = String.fromCharCode(...new Uint8Array(await written.arrayBuffer()));
  return {columns, rows, colours: [...means.data].filter((_, at) => at % 4 < 3), png: btoa(coded)};
}"""


class Blocks(NamedTuple):
    """The mean colours of the blocks of a picture."""

    columns: int
    rows: int
    colours: Sequence[int]
    """Red, green and blue of each block, block by block."""
    png: bytes


def blocks_of(page, picture: bytes, size: int = BLOCK) -> Blocks:
    """The blocks of a PNG picture, computed by the browser of a page."""
    found = page.evaluate(_BLOCKS, [base64.b64encode(picture).decode(), size])
    return Blocks(found["columns"], found["rows"], found["colours"], base64.b64decode(found["png"]))


def reference_blocks(page, reference: Path) -> Blocks:
    """The blocks of a reference picture, in which each pixel is one block."""
    return blocks_of(page, reference.read_bytes(), 1)


def different_blocks(found: Blocks, expected: Blocks) -> list[tuple[int, int]]:
    """Left and top, in pixels, of each block that differs. If the sizes differ, every block does."""
    same_size = (found.columns, found.rows) == (expected.columns, expected.rows)
    return [
        (BLOCK * (at % found.columns), BLOCK * (at // found.columns))
        for at in range(found.columns * found.rows)
        if not same_size
        or any(
            abs(found.colours[3 * at + colour] - expected.colours[3 * at + colour]) > TOLERANCE
            for colour in range(3)
        )
    ]
