#!/usr/bin/env python3
"""The C interface is as it was: symbols of liblogitd.so, its version, and the header's constants, functions and structs.

    abi_test.py LIBRARY [--update]

The kept list is abi.txt beside this file. Its lines never change or go; --update adds new ones, and refuses to where one
would go. Only a struct that begins with struct_size may grow: its size is kept as the largest so far.
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


def plain(text):
    """The header without comments."""
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


def structs_of(text):
    """The fields of each struct, in order, as (name, type), by the struct's name."""
    found = {}
    for body, name in re.findall(r"typedef struct \w+ \{(.*?)\} (\w+);", plain(text), re.S):
        fields = found[name] = []
        for declaration in filter(None, (" ".join(part.split()) for part in body.split(";"))):
            kind, first = re.match(r"(.*[ *])(\w+)", declaration.split(",")[0]).groups()
            fields += [(field.strip(), kind.strip()) for field in (first, *declaration.split(",")[1:])]
    return found


def constants_of(text):
    """Lines of the enumerators, and of the functions as they are declared."""
    names = [
        name for body in re.findall(r"enum \{(.*?)\};", plain(text), re.S) for name in re.findall(r"(\w+) =", body)
    ]
    functions = re.findall(r"^[\w ]+\*? ?logitd_\w+\([^;{]*\);", plain(text), re.M)
    return names, [f"function {' '.join(function.split())}" for function in functions]


def layout(structs, constants):
    """A line for each constant, each struct and each field, as the compiler has them."""
    prints = [f'printf("constant {name} %d\\n", (int){name});' for name in constants]
    for name, fields in structs.items():
        prints.append(f'printf("struct {name} %zu\\n", sizeof({name}));')
        for field, kind in fields:
            place = f"offsetof({name}, {field}), sizeof((({name}*)0)->{field})"
            prints.append(f'printf("field {name}.{field} at %zu, %zu bytes, {kind}\\n", {place});')
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
    grows = {name for name, fields in structs.items() if fields[0][0] == "struct_size"}
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
    library, header = sys.argv[1], HEADER.read_text()
    structs = structs_of(header)
    constants, functions = constants_of(header)
    version = ctypes.CDLL(library).logitd_abi_version()
    found = [f"version {version}", *symbols(library), *functions, *layout(structs, constants)]
    kept = KEPT.read_text().splitlines() if KEPT.exists() else []
    wrong = faults(kept, found, structs)
    if "--update" in sys.argv[2:]:
        gone = [fault for fault in wrong if "got a new line" not in fault]
        if gone:
            sys.exit("\n".join(gone))
        KEPT.write_text("\n".join(found) + "\n")
        return
    spoils = (
        kept[:-1],
        [*kept, "symbol logitd_gone"],
        [line.replace(" at 8,", " at 9,") for line in kept],
        [line.replace(", float", ", int32_t") for line in kept],
        [line.replace("LOGITD_BF16 2", "LOGITD_BF16 1") for line in kept],
    )
    for spoiled in spoils:
        if not faults(spoiled, found, structs):
            sys.exit("the comparison accepts a list that differs")
    print("\n".join(wrong) or f"{len(found)} lines are those of {KEPT.name}")
    print(f"{int(not wrong)} passed, {int(bool(wrong))} failed")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
