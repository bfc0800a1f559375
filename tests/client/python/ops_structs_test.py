"""The ctypes structs of logitd.ops are those of the C header, as tests/c_api/abi.txt keeps them."""

import ctypes
import pathlib
import re
import unittest

import ops_harness  # noqa: F401 - skips where there is no library

from logitd.ops import _structs

ABI = pathlib.Path(__file__).resolve().parents[2] / "c_api/abi.txt"


class StructsTest(unittest.TestCase):
    def test_sizes_and_places(self):
        kept = ABI.read_text().splitlines()
        self.assertIn(f"version {_structs.ABI_VERSION}", kept)
        structs = {**_structs.OPS, **_structs.PARTS}
        lines = []
        for name, struct in structs.items():
            lines.append(f"struct logitd_{name} {ctypes.sizeof(struct)}")
            for field, _ in struct._fields_:
                place = getattr(struct, field)
                lines.append(f"field logitd_{name}.{field} at {place.offset}, {place.size} bytes")
        for name in structs:
            self.assertEqual(
                [line for line in lines if f" logitd_{name}." in line or line.startswith(f"struct logitd_{name} ")],
                [
                    re.sub(r"(bytes), .*", r"\1", line)
                    for line in kept
                    if f" logitd_{name}." in line or line.startswith(f"struct logitd_{name} ")
                ],
            )


if __name__ == "__main__":
    unittest.main()
