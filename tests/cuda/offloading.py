"""A 64 MB leaf goes to a GPU, through a computation and back, again and again, each leg in a thread of its own.

Both directions go on while the GPU computes. The source is overwritten as soon as its copy is said to be done, and
memory is let go of as soon as it has been read, so that a copy that was not waited for shows. As a program: prints what
`offload` found as JSON.
"""

import hashlib
import json
import sys
import threading
from queue import Queue

import torch

from rpfunc.runtime.cuda import open_cuda

LEAF = 1 << 24
"""Elements, of four bytes."""


def offload(rounds, channels=("parameter_upload", "gradient_download")):
    """Returns the largest error of any round, and a digest of all that came back."""
    device, up, down = open_cuda(0, None), Queue(2), Queue(2)
    failures, digest, worst = [], hashlib.sha256(), 0.0

    def upload():
        source = torch.empty(LEAF).pin_memory()
        for number in range(rounds):
            source.fill_(number)
            target = device.allocate(source, source.dtype)
            device.copy(target, source, channels[0])
            up.put(target)
            del target

    def compute():
        weight = device.run(lambda: torch.ones(4096, 4096))
        for _ in range(rounds):
            leaf = up.get()

            def work(leaf=leaf):
                for _ in range(4):
                    weight @ weight  # takes longer than a copy may lag behind, and uses memory that others leave
                return 2 * leaf + 1

            down.put(device.run(work))
            del leaf, work

    def start(function):
        def guarded():
            try:
                function()
            except BaseException as error:
                failures.append(error)
                up.put(None)
                down.put(None)

        thread = threading.Thread(target=guarded, daemon=True)
        thread.start()
        return thread

    threads = [start(upload), start(compute)]
    for number in range(rounds):
        output = down.get()
        if output is None:
            raise failures[0]
        back = device.allocate_on_host(output)
        device.copy(back, output, channels[1])
        del output
        worst = max(worst, float((back - (2 * number + 1)).abs().max()))
        digest.update(back[:: 1 << 12].numpy().tobytes())
    for thread in threads:
        thread.join()
    return {"max_error": worst, "digest": digest.hexdigest()}


if __name__ == "__main__":
    print(json.dumps(offload(int(sys.argv[1]))))
