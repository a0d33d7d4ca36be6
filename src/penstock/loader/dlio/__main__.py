"""`python -m penstock.loader.dlio workload=… [options of DLIO]`: DLIO with Penstock in its reach.

DLIO 2.0.0 needs two things that this adds. It imports tensorflow for every job, also where torch is
the framework and nothing of tensorflow is used: an empty module of that name suffices. And it runs
its stock loader when a class that it was told to use does not exist: here that is an error.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec

from penstock.loader.dlio.classes import refuse_missing_class

if importlib.util.find_spec("tensorflow") is None:
    # At import, not in main(): processes that torch spawns import this module again.
    sys.modules["tensorflow"] = importlib.util.module_from_spec(ModuleSpec("tensorflow", None))


def main() -> None:
    """Run DLIO with the arguments of this process."""
    from dlio_benchmark import main as dlio
    from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
    from dlio_benchmark.reader.reader_handler import FormatReader
    from dlio_benchmark.utils.config import ConfigArguments

    def checked(args: ConfigArguments, config: object) -> None:
        load(args, config)
        if args.data_loader_classname is not None:
            refuse_missing_class(args.data_loader_classname, BaseDataLoader)
        if args.reader_classname is not None:
            refuse_missing_class(args.reader_classname, FormatReader)

    # Classes can be named in a file or on the command line; DLIO joins both here.
    load, dlio.LoadConfig = dlio.LoadConfig, checked
    dlio.main()


if __name__ == "__main__":
    main()
