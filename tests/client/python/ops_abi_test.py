"""The structs of logitd.ops have the sizes and offsets that a C compiler gives those of kernels/c_api.h."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

from ops_harness import ops  # noqa: F401  skips without torch or the library

from logitd.ops import _structs, _tensors

HEADER = pathlib.Path(__file__).resolve().parents[3] / "kernels/c_api.h"
COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
ARRAY_ELEMENTS = {"biases"}  # Lists stands for it: pointers of any kind


class AbiTest(unittest.TestCase):
    def test_sizes_and_offsets(self):
        if COMPILER is None or not HEADER.exists():
            self.skipTest("no C compiler, or no header")
        structs = {**_structs.PARTS, **_structs.OPS, "biases": _structs.Lists}
        lines = []
        for name, struct in structs.items():
            lines.append(f'printf("{name} %zu\\n", sizeof(logitd_{name}));')
            for field, _ in struct._fields_:
                size = f"sizeof(((logitd_{name}*)0)->{field})"
                lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof(logitd_{name}, {field}), {size});')
        own = []
        for name, struct in structs.items():
            own.append(f"{name} {_structs.ctypes.sizeof(struct)}")
            for field, _ in struct._fields_:
                at = getattr(struct, field)
                own.append(f"{name}.{field} {at.offset} {at.size}")
        self.assertEqual(self.run_c(lines), own)

    def test_every_struct_and_op_of_the_header_is_here(self):
        text = HEADER.read_text()
        named = set(re.findall(r"^typedef struct logitd_(\w+) \{", text, re.MULTILINE))
        self.assertEqual(named - set(_structs.PARTS) - ARRAY_ELEMENTS - {"row_status"}, set(_structs.OPS))
        self.assertEqual(set(re.findall(r"^int32_t logitd_run_(\w+)\(", text, re.MULTILINE)), set(_structs.OPS))

    def test_numbers_of_dtypes_and_the_version(self):
        if COMPILER is None:
            self.skipTest("no C compiler")
        names = ("ABI_VERSION", "F32", "F16", "BF16", "ROW_REFUSED", "FORWARD_KL", "JENSEN_SHANNON", "SMOOTHING_MEGATRON")
        numbers = [int(line) for line in self.run_c([f'printf("%d\\n", LOGITD_{name});' for name in names])]
        self.assertEqual(numbers, [_structs.ABI_VERSION, *_tensors.DTYPES.values(), 4, 0, 2, 1])

    def run_c(self, lines):
        """The lines that a C program with these statements prints."""
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "abi.c")
            source.write_text(
                "#include <stddef.h>\n#include <stdio.h>\n"
                f'#include "{HEADER}"\nint main(void) {{\n' + "\n".join(lines) + "\nreturn 0;\n}\n"
            )
            subprocess.run([COMPILER, "-std=c99", "-o", f"{folder}/abi", source], check=True)
            return subprocess.run([f"{folder}/abi"], check=True, capture_output=True, text=True).stdout.splitlines()


if __name__ == "__main__":
    unittest.main()
