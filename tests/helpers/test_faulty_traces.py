"""The download links for lesson 16's traces."""

import base64
import gzip
import re

from helpers import faulty_traces


def test_a_download_contains_the_complete_trace(tmp_path):
    paths = {letter: tmp_path / f"{letter}.json" for letter in "AB"}
    for letter, path in paths.items():
        path.write_text(f'{{"traceEvents": [], "letter": "{letter}"}}')
    links = re.findall(
        r'download="(.*?)\.gz" href=".*?base64,(.*?)"', faulty_traces.downloads(paths).data
    )
    packed = {name: gzip.decompress(base64.b64decode(held)) for name, held in links}
    assert packed == {path.name: path.read_bytes() for path in paths.values()}
