#!/usr/bin/env python3
"""The C interface is what it was: symbols of liblogitd.so, its version, and the fields of every struct of the header.

    abi_test.py LIBRARY [--update]

The kept list is abi.txt beside this file. Its lines never change or go; new symbols and new fields at a struct's end are
added to it by --update. A struct that callers embed, which has no struct_size, must not grow either.
"""

import ctypes
import difflib
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
HEADER = HERE.parents[1] / "kernels/c_api.h"
KEPT = HERE / "abi.txt"


def structs_of(text):
    """The fields of each struct, in order, by the struct's name."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", text, re.S):
        fields = found[name] = []
        for declaration in filter(None, (part.strip() for part in body.split(";"))):
            fields += re.findall(r"(\w+)(?=\s*(?:,|$))", declaration)
    return found


def layout(structs):
    """A line for each struct and each field, as the compiler lays them out."""
    prints = []
    for name, fields in structs.items():
        prints.append(f'printf("struct {name} %zu\\n", sizeof({name}));')
        for field in fields:
            place = f"offsetof({name}, {field}), sizeof((({name}*)0)->{field})"
            prints.append(f'printf("field {name}.{field} at %zu, %zu bytes\\n", {place});')
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder, "layout.c")
        program.write_text(
            f'#include <stddef.h>\n#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{\n'
            + "\n".join(prints)
            + "\nreturn 0;\n}\n"
        )
        subprocess.run(["cc", "-std=c11", "-o", f"{folder}/layout", program], check=True)
        return subprocess.run([f"{folder}/layout"], check=True, capture_output=True, text=True).stdout.splitlines()


def symbols(library):
    listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    return [f"symbol {line.split()[2]}" for line in sorted(listed.splitlines(), key=lambda line: line.split()[2])]


def faults(kept, found, structs):
    """The lines that may not be as they are, each with what is wrong."""
    grows = {name for name, fields in structs.items() if fields[0] == "struct_size"}
    wrong = []
    for line in kept:
        sized = re.match(r"struct (\w+) (\d+)$", line)
        if sized and sized[1] in grows:  # it may grow
            now = next((other for other in found if other.startswith(f"struct {sized[1]} ")), "struct x 0")
            if int(now.split()[2]) >= int(sized[2]):
                continue
        if line not in found:
            wrong.append(f"{line}: got {difflib.get_close_matches(line, found, 1) or 'none'}, allowed as it was")
    for line in found:
        if line not in kept:
            wrong.append(f"{line}: got a new line, allowed after abi_test.py --update has added it to {KEPT.name}")
    return wrong


def main():
    library = sys.argv[1]
    structs = structs_of(HEADER.read_text())
    version = ctypes.CDLL(library).logitd_abi_version()
    found = [f"version {version}", *symbols(library), *layout(structs)]
    if "--update" in sys.argv[2:]:
        KEPT.write_text("\n".join(found) + "\n")
    kept = KEPT.read_text().splitlines()
    for spoiled in (kept[:-1], [*kept, "symbol logitd_gone"], [line.replace(" at 8,", " at 9,") for line in kept]):
        if not faults(spoiled, found, structs):
            sys.exit("the comparison accepts a list that differs")
    wrong = faults(kept, found, structs)
    print("\n".join(wrong) or f"{len(found)} lines are those of {KEPT.name}")
    print(f"{int(not wrong)} passed, {int(bool(wrong))} failed")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
