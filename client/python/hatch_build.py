"""Makes what the package has beside its Python: the message types, and the library of logitd.ops.

logitd/descriptors.binpb: generated code of protoc runs only with the protobuf releases next to its own. A serialized
FileDescriptorSet has no such tie: the package makes its message classes from it at import, with whatever protobuf is
there. Nothing generated is committed, so nothing can be out of date. An sdist has no proto/; it ships the file.

logitd/liblogitd.so: built from the checkout, and put into the wheel with the shared libraries that it needs and a plain
system lacks. It has CUDA where nvcc is found, for this machine's GPU, or for LOGITD_CUDA_ARCHITECTURES. LOGITD_OPS is the
path of one that is built already, or `off`: a wheel without it, for any machine. Where something is missing that the
build needs, the wheel is without it too.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ARTIFACT = "logitd/descriptors.binpb"
LIBRARY = "logitd/liblogitd.so"
# Libraries that come with the wheel: others are those of every Linux system.
CARRIED = re.compile(r"^\s*(lib(?:absl|hwy)\S+) => (\S+)", re.M)
HEADERS = ("absl/status/statusor.h", "hwy/highway.h")


class PackageHook(BuildHookInterface):
    def dependencies(self):
        if self.target_name != "wheel" or os.environ.get("LOGITD_OPS"):
            return []
        return [name for name in ("cmake", "ninja") if shutil.which(name) is None]

    def initialize(self, version, build_data):
        root = pathlib.Path(self.root)
        if not (root / "PKG-INFO").exists():  # else this is an unpacked sdist
            compile_descriptors(root.parent.parent / "proto", root / ARTIFACT)
        build_data["artifacts"].append(ARTIFACT)
        if self.target_name == "wheel" and version == "standard":
            self.add_library(root, build_data)

    def add_library(self, root, build_data):
        library = library_for(root)
        if library is None:
            return
        stage = root.parent.parent / "build" / "wheel"
        shutil.rmtree(stage, ignore_errors=True)
        stage.mkdir(parents=True)
        for name, path in [(LIBRARY, library), *((f"logitd/{name}", path) for name, path in carried_by(library))]:
            copy = stage / pathlib.Path(name).name
            shutil.copy(path, copy)
            if shutil.which("strip"):
                subprocess.run(["strip", "--strip-unneeded", copy], check=True)
            build_data["force_include"][str(copy)] = name
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def compile_descriptors(protos, out):
    from grpc_tools import protoc

    files = sorted(map(str, protos.glob("logitd/v1/*.proto")))
    if not files:
        raise RuntimeError(
            f"proto files: got none in {protos}, allowed is a checkout of the whole repository, or an sdist"
        )
    code = protoc.main(["protoc", f"-I{protos}", "--include_imports", f"--descriptor_set_out={out}", *files])
    if code != 0:
        raise RuntimeError(f"protoc failed with exit code {code}")


def library_for(root):
    """The path of liblogitd.so, or None."""
    chosen = os.environ.get("LOGITD_OPS")
    if chosen == "off":
        return None
    if chosen:
        if not pathlib.Path(chosen).is_file():
            raise RuntimeError(f"LOGITD_OPS: got {chosen}, allowed the path of a built liblogitd.so, or off")
        return pathlib.Path(chosen).resolve()
    source = root.parent.parent
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if not (source / "kernels/c_api.h").exists() or compiler is None:
        return left_out("a checkout of the whole repository and a C++ compiler (c++)")
    for header in HEADERS:
        found = subprocess.run([compiler, "-E", "-x", "c++", "-"], input=f"#include <{header}>\n".encode(),
                               capture_output=True)  # fmt: skip
        if found.returncode != 0:
            return left_out(header)
    return build(source)


def left_out(what):
    print(
        f"logitd: without {LIBRARY}, which logitd.ops needs: no {what}; scripts/setup installs what its build needs",
        file=sys.stderr,
    )


def build(source):
    """Builds the library in build/python of the checkout; again only what has changed."""
    folder = source / "build" / "python"
    options = ["-DLOGITD_OPS_ONLY=ON", "-DCMAKE_BUILD_TYPE=Release"]
    architectures = os.environ.get("LOGITD_CUDA_ARCHITECTURES") or architecture_here()
    options.append(f"-DLOGITD_CUDA_ARCHITECTURES={architectures}" if architectures else "-DLOGITD_CUDA=OFF")
    if not architectures:
        print("logitd: ops for the CPU: no GPU here, and no LOGITD_CUDA_ARCHITECTURES", file=sys.stderr)
    subprocess.run(["cmake", "-S", source, "-B", folder, "-G", "Ninja", *options], check=True, stdout=sys.stderr)
    subprocess.run(["cmake", "--build", folder, "--target", "logitd_c"], check=True, stdout=sys.stderr)
    return (folder / "liblogitd.so").resolve()


def architecture_here():
    """CUDA's architecture of this machine's first GPU, or None."""
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True)
    found = re.match(r"(\d+)\.(\d)", answer.stdout) if answer.returncode == 0 else None
    if found is None:
        return None
    number = found[1] + found[2]
    return f"{number}a" if int(number) >= 90 else number  # from 90 on, kernels use what only that one has


def carried_by(library):
    """Names and paths of the shared libraries that the wheel has beside it."""
    listed = subprocess.run(["ldd", library], check=True, capture_output=True, text=True).stdout
    missing = re.findall(r"(\S+) => not found", listed)
    if missing:
        raise RuntimeError(f"{library}: got no {', '.join(missing)}, allowed a library whose own ones are installed")
    return CARRIED.findall(listed)
