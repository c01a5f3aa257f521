//! Requests of less than a block of the storage below the image.

use virtio_bindings::virtio_blk::*;

use super::super::BlockSpec;
use super::super::image::{Contents, Image};
use super::super::testing::*;
use crate::VirtioDevice;

const SECTOR: usize = 512;

/// A disk of blocks of 512 bytes, whose image `change` has changed.
fn guest(io_uring: bool, queues: u16, change: impl FnOnce(&mut Image)) -> Guest {
    let mut guest = Guest::with(BlockSpec { queues, ..spec(io_uring) });
    guest.stop();
    guest.change_image(change);
    guest.start();
    guest
}

/// As with direct I/O on storage with blocks of 4 KiB.
fn large_blocks(image: &mut Image) {
    image.alignment = 4096;
    image.strict = true;
}

/// Pseudorandom numbers, the same in each run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

#[test]
fn requests_of_any_sectors_are_served_on_larger_blocks() {
    for io_uring in ENGINES {
        let mut guest = guest(io_uring, 1, large_blocks);
        let (mut shadow, mut numbers) = (vec![0; SIZE], Numbers(1));
        for round in 0..300 {
            let len = SECTOR * (1 + numbers.below(24));
            let sector = numbers.below(SIZE / SECTOR - len / SECTOR + 1);
            let place = sector * SECTOR..sector * SECTOR + len;
            if numbers.below(2) == 0 {
                let data = pattern(len, round as u8);
                shadow[place].copy_from_slice(&data);
                assert_eq!(guest.write(sector as u64, &data), (OK, 1), "{io_uring} {round}");
            } else {
                assert_eq!(guest.read(sector as u64, len), (OK, shadow[place].to_vec()), "{io_uring} {round}");
            }
        }
        // Larger than the buffer, with partial blocks at both ends.
        let data = pattern(600 << 10, 0x55);
        let place = 3 * SECTOR..3 * SECTOR + data.len();
        assert_eq!(guest.write(3, &data).0, OK);
        assert_eq!(guest.read(3, data.len()), (OK, data.clone()));
        shadow[place].copy_from_slice(&data);
        assert!(guest.image() == shadow, "{io_uring}");
    }
}

/// Makes a write of `data`, placed in memory at `at`, available to `queue`.
fn begin(guest: &mut Guest, queue: usize, sector: u64, at: u64, data: &[u8]) {
    let n = (at - BUFFERS) / 0x4000;
    let (header_at, status_at) = (HEADER_AT + 16 * (n % 64), STATUS_AT + n % 64);
    guest.put(header_at, &header(VIRTIO_BLK_T_OUT, sector));
    guest.put(status_at, &[0xee]);
    guest.put(at, data);
    guest.queues[queue].add(&[(header_at, 16, 0), (at, data.len() as u32, 0), (status_at, 1, WRITE)]);
}

/// A queue writes whole blocks, another a sector of each. Either may win, but only for that sector.
#[test]
fn a_change_of_a_part_of_a_block_loses_no_write_beside_it() {
    for io_uring in ENGINES {
        let mut guest = guest(io_uring, 2, |image| {
            large_blocks(image);
            // A change takes some milliseconds from reading a block to writing it.
            image.slowness = std::time::Duration::from_secs(4);
        });
        for round in 0..20u8 {
            let (whole, part) = (round.wrapping_mul(2), round.wrapping_mul(2) + 1);
            for block in 0..4u64 {
                begin(&mut guest, 0, 8 * block + 2, BUFFERS + 0x4000 * block, &[part; SECTOR]);
                begin(&mut guest, 1, 8 * block, BUFFERS + 0x4000 * (4 + block), &[whole; 8 * SECTOR]);
            }
            guest.kick(0);
            guest.kick(1);
            guest.await_used(0, 4);
            guest.await_used(1, 4);
            let image = guest.image();
            for (n, byte) in image[..4 * 4096].iter().enumerate() {
                let is_shared = n / SECTOR % 8 == 2;
                assert!(*byte == whole || is_shared && *byte == part, "{io_uring} {round}: {byte} at {n}");
            }
        }
    }
}

/// Alternates whole and partial blocks in one queue: a partial write waits for the queue's own writes.
#[test]
fn a_queue_of_whole_and_partial_blocks_ends() {
    for io_uring in ENGINES {
        let mut guest = guest(io_uring, 2, large_blocks);
        for round in 0..20u8 {
            let mut shadow = guest.image();
            for n in 0..16u64 {
                for queue in 0..2u64 {
                    let (block, byte) = (2 * n + queue, round ^ n as u8 ^ (queue as u8) << 7);
                    let (sector, len) = if n % 2 == 0 { (8 * block, 4096) } else { (8 * block + n % 8, SECTOR) };
                    let data = vec![byte; len];
                    shadow[sector as usize * SECTOR..][..len].copy_from_slice(&data);
                    begin(&mut guest, queue as usize, sector, BUFFERS + 0x4000 * (16 * queue + n), &data);
                }
            }
            guest.kick(0);
            guest.kick(1);
            guest.await_used(0, 16);
            guest.await_used(1, 16);
            assert!(guest.image() == shadow, "{io_uring} {round}");
        }
    }
}

/// A block device zeroes whole blocks only, which may be larger than the block size that a driver reads.
#[test]
fn ranges_of_any_sectors_are_zeroed_on_larger_blocks() {
    for io_uring in ENGINES {
        let mut guest = guest(io_uring, 1, |image| {
            if let Contents::Raw(raw) = &mut image.contents {
                raw.range_unit = 4096;
            }
        });
        if guest.device.features() & 1 << VIRTIO_BLK_F_DISCARD == 0 {
            return;
        }
        let mut shadow = pattern(SIZE, 7);
        for (n, part) in shadow.chunks(256 << 10).enumerate() {
            assert_eq!(guest.write((n * 512) as u64, part).0, OK);
        }
        for (sector, count) in [(8, 8), (9, 3), (14, 4), (17, 30), (40, 9), (63, 17), (100, 1)] {
            let place = sector * SECTOR..(sector + count) * SECTOR;
            shadow[place.clone()].fill(0);
            guest.put(BUFFERS, &segment(sector as u64, count as u32, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP));
            assert_eq!(guest.request(VIRTIO_BLK_T_WRITE_ZEROES, 0, &[(BUFFERS, 16, 0)]).0, OK, "{sector}");
            assert!(guest.image() == shadow, "{io_uring} {sector}");
        }
        // Data next to the discarded range does not change.
        guest.put(BUFFERS, &segment(201, 30, 0));
        assert_eq!(guest.request(VIRTIO_BLK_T_DISCARD, 0, &[(BUFFERS, 16, 0)]).0, OK);
        let image = guest.image();
        assert!(image[..201 * SECTOR] == shadow[..201 * SECTOR] && image[231 * SECTOR..] == shadow[231 * SECTOR..]);
    }
}
