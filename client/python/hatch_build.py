"""Makes logitd/descriptors.binpb, the message types of proto/, when the package is built.

Generated code of protoc runs only with the protobuf releases next to its own. A serialized FileDescriptorSet has no
such
tie: the package makes its message classes from it at import, with whatever protobuf is there. Nothing generated is
committed, so nothing can be out of date. An sdist has no proto/; it ships the file.
"""

import pathlib

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ARTIFACT = "logitd/descriptors.binpb"


class DescriptorHook(BuildHookInterface):
    def initialize(self, version, build_data):
        root = pathlib.Path(self.root)
        if not (root / "PKG-INFO").exists():  # else this is an unpacked sdist
            compile_descriptors(root.parent.parent / "proto", root / ARTIFACT)
        build_data["artifacts"].append(ARTIFACT)


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
