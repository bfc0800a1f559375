"""Rows in memory of a GPU. What needs a GPU and torch is skipped without."""

import ctypes
import gc
import unittest

import logitd
import numpy as np
from harness import RunningServer, ServerTestCase, TestCase
from logitd import _cuda

try:
    import torch
except ImportError:
    torch = None

MIB = 1 << 20


class FakeMapping:
    address, device, nbytes = 0x7F0000000000, 3, 2 * MIB


class DLPackTest(TestCase):
    def tensor(self, capsule):
        pointer = _cuda._pointer_of(id(capsule), b"dltensor")
        return ctypes.cast(pointer, ctypes.POINTER(_cuda._DLManagedTensor))

    def test_a_capsule_has_what_the_array_is(self):
        for dtype, code, bits in (("f32", 2, 32), ("f16", 2, 16), ("bf16", 4, 16)):
            array = _cuda.Exported(FakeMapping(), 64, (2, 5), dtype)
            self.assertEqual(array.__dlpack_device__(), (2, 3))
            capsule = array.__dlpack__(stream=None)
            tensor = self.tensor(capsule).contents.tensor
            self.assertEqual((tensor.data, tensor.byte_offset), (FakeMapping.address + 64, 0))
            self.assertEqual((tensor.device_type, tensor.device_id), (2, 3))
            self.assertEqual((tensor.code, tensor.bits, tensor.lanes), (code, bits, 1))
            self.assertEqual((tensor.ndim, tensor.shape[0], tensor.shape[1]), (2, 2, 5))
            self.assertFalse(tensor.strides)

    def test_a_capsule_that_nobody_took_is_let_go(self):
        before = len(_cuda._alive)
        capsule = _cuda.Exported(FakeMapping(), 0, (4,), "f32").__dlpack__()
        self.assertEqual(len(_cuda._alive), before + 1)
        del capsule
        gc.collect()
        self.assertEqual(len(_cuda._alive), before)

    def test_a_taken_tensor_keeps_the_mapping_until_it_is_deleted(self):
        before = len(_cuda._alive)
        capsule = _cuda.Exported(FakeMapping(), 0, (4,), "f32").__dlpack__()
        managed = self.tensor(capsule)
        rename = ctypes.pythonapi.PyCapsule_SetName
        rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
        used = b"used_dltensor"  # as a library that has taken it says
        rename(capsule, used)
        del capsule
        gc.collect()
        self.assertEqual(len(_cuda._alive), before + 1)
        managed.contents.deleter(managed)
        self.assertEqual(len(_cuda._alive), before)


class RefusalsTest(ServerTestCase):
    ARENAS = True

    def test_a_server_without_a_gpu_says_so(self):
        with self.refused(logitd.Unimplemented, "got kind 2 (memory of a GPU), allowed 1 (memory of the host)"):
            logitd.CudaArena.lease(self.server.arena, MIB)

    def test_arguments_that_cannot_work_are_refused(self):
        for arguments, text in (
            (("127.0.0.1:7450", 1), "address: got '127.0.0.1:7450', allowed unix:PATH"),
            ((self.server.arena, 0), "nbytes: got 0, allowed 1 or more"),
            ((self.server.arena, 1, -1), "device: got -1, allowed None, or 0 or more"),
            ((self.server.arena, 1, 2**32), "device: got 4294967296"),
        ):
            with self.refused(logitd.InvalidArgument, text):
                logitd.CudaArena.lease(*arguments)


@unittest.skipUnless(torch is not None and torch.cuda.is_available(), "there is no torch with a GPU")
class CudaTest(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = RunningServer(arenas=True, backend="cuda")

    @classmethod
    def tearDownClass(cls):
        cls.server.close()

    def test_answers_are_those_of_sent_rows_to_the_bit(self):
        with logitd.CudaArena.lease(self.server.arena, 32 * MIB) as arena, logitd.Client(self.server.unix) as client:
            for kind, name in ((torch.float32, "f32"), (torch.float16, "f16"), (torch.bfloat16, "bf16")):
                logits = arena.empty_tensor((4, 50257), name)
                self.assertEqual((logits.dtype, logits.device.index), (kind, arena.device))
                logits.copy_(torch.randn(4, 50257))
                torch.cuda.synchronize()
                for rows in (logits, logits[1:3], logits[:, :50000], logits[2]):
                    sent = client.top_k(rows.cpu().contiguous(), k=5)
                    top = client.top_k(rows, k=5, arena=arena)
                    self.assertTrue(torch.equal(sent.probs.values, top.probs.values))
                    self.assertTrue(torch.equal(sent.indices.values, top.indices.values))

    def test_what_does_not_lie_there_is_refused_unsent(self):
        with logitd.CudaArena.lease(self.server.arena, 2 * MIB) as arena, logitd.Client(self.server.unix) as client:
            inside = arena.empty_tensor((4, 100))
            for rows, text in (
                (torch.zeros(4, 100, device="cuda"), "does not lie in the arena"),
                (inside.t(), "got strides"),
                (np.zeros((4, 100), np.float32), "allowed with an arena of a GPU a torch tensor"),
            ):
                with self.refused(logitd.InvalidArgument, text):
                    client.top_k(rows, k=1, arena=arena)
            with self.refused(logitd.InvalidArgument, "allowed the 2095"):
                arena.empty_tensor(2 * MIB)
            with self.refused(logitd.InvalidArgument, "attention takes arrays of the host"):
                client.attention_softmax(np.zeros((4, 4), np.float32), arena=arena)
        with self.refused(logitd.InvalidArgument, "got one that is closed"):
            arena.tensor(0, 1)

    def test_tensors_keep_the_memory_and_then_it_is_free(self):
        with logitd.CudaArena.lease(self.server.arena, 256 * MIB) as arena:
            tensor = arena.empty_tensor((16, 1024))
            tensor.fill_(7)
        del arena
        gc.collect()
        self.assertEqual(tensor.sum().item(), 7 * 16 * 1024)
        free = torch.cuda.mem_get_info()[0]
        del tensor
        gc.collect()
        self.assertGreaterEqual(torch.cuda.mem_get_info()[0], free + 256 * MIB)


if __name__ == "__main__":
    unittest.main()
