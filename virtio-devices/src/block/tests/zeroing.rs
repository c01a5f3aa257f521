//! Zeroed ranges on storage that lacks a zeroing method.

use std::os::fd::AsRawFd;

use rustix::fs::{MemfdFlags, memfd_create};
use virtio_bindings::virtio_blk::*;

use super::super::image::{Contents, Image};
use super::super::operation::{Operation, Range};
use super::super::testing::*;
use super::super::zeroing::Zeroing;
use super::super::{Block, BlockSpec, ImageFormat};
use crate::VirtioDevice;
use crate::transport::features::has;

/// A disk whose image `change` has changed.
fn guest(io_uring: bool, change: impl FnOnce(&mut Image)) -> Guest {
    let mut guest = Guest::new(io_uring);
    guest.stop();
    guest.change_image(change);
    guest.start();
    guest
}

fn fill(guest: &mut Guest) -> Vec<u8> {
    let data = pattern(SIZE, 9);
    for (n, part) in data.chunks(256 << 10).enumerate() {
        assert_eq!(guest.write((n * 512) as u64, part).0, OK);
    }
    data
}

fn zero(guest: &mut Guest, kind: u32, sector: u64, count: u32, flags: u32) -> u8 {
    guest.put(BUFFERS, &segment(sector, count, flags));
    guest.request(kind, 0, &[(BUFFERS, 16, 0)]).0
}

/// Whole blocks of 4 KiB and parts of them, and more than one write of zeros covers.
const RANGES: [(u64, u32); 5] = [(8, 8), (17, 30), (65, 1), (100, 3), (201, 1400)];

#[test]
fn zeros_are_written_where_storage_refuses_to_zero() {
    for refused in [vec![Zeroing::InPlace], vec![Zeroing::Hole], vec![Zeroing::Hole, Zeroing::InPlace]] {
        for (io_uring, alignment, unit) in [(true, 1, 1), (false, 1, 1), (false, 4096, 1), (true, 1, 4096)] {
            let mut guest = guest(io_uring, |image| {
                (image.alignment, image.strict, image.refused) = (alignment, alignment > 1, refused.clone());
                if let Contents::Raw(raw) = &mut image.contents {
                    raw.range_unit = unit;
                }
            });
            assert!(has(guest.device.features(), VIRTIO_BLK_F_WRITE_ZEROES));
            for flags in [0, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP] {
                let mut expected = fill(&mut guest);
                for (sector, count) in RANGES {
                    let status = zero(&mut guest, VIRTIO_BLK_T_WRITE_ZEROES, sector, count, flags);
                    assert_eq!(status, OK, "{refused:?} {io_uring} {alignment} {unit} {flags} {sector}");
                    expected[sector as usize * 512..][..count as usize * 512].fill(0);
                }
                assert!(guest.image() == expected, "{refused:?} {io_uring} {alignment} {unit} {flags}");
            }
        }
    }
}

#[test]
fn a_discard_that_storage_refuses_changes_nothing() {
    for io_uring in ENGINES {
        let mut guest = guest(io_uring, |image| image.refused = vec![Zeroing::Hole]);
        if !has(guest.device.features(), VIRTIO_BLK_F_DISCARD) {
            return;
        }
        let expected = fill(&mut guest);
        assert_eq!([8, 9].map(|sector| zero(&mut guest, VIRTIO_BLK_T_DISCARD, sector, 8, 0)), [OK, OK]);
        assert!(guest.image() == expected);
        // The refusal is remembered, and the call is not repeated.
        let range = Range { offset: 0, len: 512 };
        assert_eq!(guest.device.image.lacking.way(Operation::Discard(range)), Zeroing::Nothing);
    }
}

/// The kernel's in-memory file system frees space, and has no other zeroing method.
#[test]
fn tmpfs_zeroes_with_and_without_giving_space_back() {
    for io_uring in ENGINES {
        let file = memfd_create("disk", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, SIZE as u64).unwrap();
        let mut guest = Guest::new(io_uring);
        guest.stop();
        let path = format!("/proc/self/fd/{}", file.as_raw_fd()).into();
        guest.device = Block::open(BlockSpec { path, ..spec(io_uring) }).unwrap();
        guest.start();
        let mut expected = fill(&mut guest);
        for (flags, (sector, count)) in [0, 1, 0, 1, 0].into_iter().zip(RANGES) {
            assert_eq!(zero(&mut guest, VIRTIO_BLK_T_WRITE_ZEROES, sector, count, flags), OK, "{io_uring} {sector}");
            expected[sector as usize * 512..][..count as usize * 512].fill(0);
        }
        assert_eq!(zero(&mut guest, VIRTIO_BLK_T_DISCARD, 1000, 8, 0), OK);
        for (n, part) in expected.chunks(64 << 10).enumerate().filter(|(n, _)| *n != 7) {
            assert!(guest.read(n as u64 * 128, part.len()) == (OK, part.to_vec()), "{io_uring} {n}");
        }
    }
}

#[test]
fn a_driver_cannot_make_a_raw_disk_look_like_another_format() {
    for io_uring in ENGINES {
        let mut guest = Guest::new(io_uring);
        let mut sector = pattern(1024, 5);
        assert_eq!(guest.write(0, &sector).0, OK);
        let expected = guest.image();
        sector[..4].copy_from_slice(b"QFI\xfb");
        assert_eq!(guest.write(0, &sector).0, IOERR);
        assert!(guest.image() == expected);
        // Anywhere else the signature is data, as it is in an image that is configured as raw.
        assert_eq!(guest.write(1, &sector).0, OK);
        let mut guest = Guest::with(BlockSpec { format: ImageFormat::Raw, ..spec(io_uring) });
        assert_eq!(guest.write(0, &sector).0, OK);
        assert!(guest.image().starts_with(b"QFI\xfb"));
    }
}
