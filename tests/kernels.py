"""Kernels of notebooks for the tests: forked from the server that has imported all once, as the ranks
and commands in `processes` are. A kernel that is started anew imports for six seconds."""

import os
import signal
import sys
from pathlib import Path

TESTS = Path(__file__).parent
LAUNCHER = "ipykernel_launcher"  # the module that a kernel's command names


class ForkedKernel:
    """What `jupyter_client` uses of a subprocess.Popen."""

    stdin = stdout = stderr = None

    def __init__(self, process):
        self.process, self.pid = process, process.pid

    @property
    def returncode(self):
        return self.process.exitcode

    def poll(self):
        return self.process.exitcode

    def wait(self, timeout=None):
        self.process.join(timeout)
        return self.process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def launch_kernel(command, env=None, cwd=None, **_):
    """Stands in for `jupyter_client.launcher.launch_kernel`."""
    from processes import FORKSERVER, until

    words = command[command.index(LAUNCHER) :]
    variables = dict(os.environ if env is None else env)
    process = FORKSERVER.Process(target=as_kernel, args=(words, variables, cwd or os.getcwd()))
    process.start()
    # before that, a signal to its group would be one to the tests
    until(lambda: os.getpgid(process.pid) == process.pid)
    return ForkedKernel(process)


def as_kernel(words, variables, folder):
    """In a process and session of its own: what `python -m ipykernel_launcher` does, in this folder and
    with these variables. The tests' own modules are not there."""
    import matplotlib
    from ipykernel.kernelapp import IPKernelApp

    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables, JPY_PARENT_PID=str(os.getppid()))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = words
    sys.path[:] = [path for path in sys.path if not Path(path).is_relative_to(TESTS)]
    # where matplotlib is imported in the kernel, it takes this from the variables
    backend = variables.get("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    matplotlib.rcParams["backend"] = backend
    IPKernelApp.launch_instance(words[1:])
