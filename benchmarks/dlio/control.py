"""Two controls: no data at all, and DLIO's npz reader without a debug message.

`NoDataLoader` delivers the same tensor for every step and reads nothing. What is missing to 100 %
under it is DLIO's own: its barrier and its log line for each step. DLIO's synthetic loader would
do, but importing it needs NVIDIA DALI.

DLIO's readers format the whole index map of the rank for a debug message, for each sample, also
where nothing is logged. With 10,000 samples that takes longer than reading one. `MendedReader` is
DLIO's reader without it, so that a difference to Penstock is not a difference to that message.
"""

import torch
from dlio_benchmark.common.enumerations import DataLoaderType
from dlio_benchmark.data_loader.base_data_loader import BaseDataLoader
from dlio_benchmark.reader.npz_reader import NPZReader


class NoDataLoader(BaseDataLoader):
    def __init__(self, format_type, dataset_type, epoch_number):
        super().__init__(format_type, dataset_type, epoch_number, DataLoaderType.PYTORCH)

    def read(self):
        one = torch.from_numpy(self._args.resized_image)
        self._batch = one.expand(self.batch_size, *one.shape)

    def next(self):
        for _ in range(self.num_samples // (self.batch_size * self._args.comm_size)):
            yield self._batch

    def finalize(self):
        pass


class MendedReader(NPZReader):
    def read_index(self, image_idx, step):
        self.step, self.image_idx = step, image_idx
        filename, row = self.global_index_map[image_idx]
        self.open_file_map[filename] = self.open(filename)
        self.get_sample(filename, row)
        self.open_file_map[filename] = None
        return self._args.resized_image
