//! Any sequence of requests has the same effect on the image as on a byte vector.

use proptest::prelude::*;
use virtio_bindings::virtio_blk::*;

use super::super::testing::*;
use crate::VirtioDevice;
use crate::transport::features::has;

/// The sectors that requests use: few, so that they overlap.
const SECTORS: u64 = 64;

#[derive(Debug, Clone)]
enum Op {
    Write { sector: u64, sectors: u64, seed: u8 },
    Read { sector: u64, sectors: u64 },
    Zero { sector: u64, sectors: u64, kind: u32, flags: u32 },
    Flush,
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    let place = || (0..SECTORS, 1..16u64);
    let kind = prop_oneof![
        Just((VIRTIO_BLK_T_DISCARD, 0)),
        Just((VIRTIO_BLK_T_WRITE_ZEROES, 1)),
        Just((VIRTIO_BLK_T_WRITE_ZEROES, 0))
    ];
    prop_oneof![
        4 => (place(), any::<u8>()).prop_map(|((sector, sectors), seed)| Op::Write { sector, sectors, seed }),
        4 => place().prop_map(|(sector, sectors)| Op::Read { sector, sectors }),
        2 => (place(), kind).prop_map(|((sector, sectors), (kind, flags))| Op::Zero { sector, sectors, kind, flags }),
        1 => Just(Op::Flush),
        1 => Just(Op::Restart),
    ]
}

/// Descriptors of `len` bytes from [`BUFFERS`], split at `cuts`.
fn pieces(len: usize, cuts: &[usize], flags: u16) -> Vec<(u64, u32, u16)> {
    let mut cuts: Vec<_> = cuts.iter().map(|cut| cut % len).chain([0, len]).collect();
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| (BUFFERS + pair[0] as u64, (pair[1] - pair[0]) as u32, flags)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn the_image_is_as_the_model_after_any_requests_in_any_pieces(
        ops in prop::collection::vec((op(), prop::collection::vec(any::<usize>(), 0..6)), 1..40),
        io_uring: bool, bounce: bool,
    ) {
        let mut guest = Guest::new(io_uring);
        let features = guest.device.features();
        if bounce {
            guest.stop();
            guest.align(512);
            guest.start_with(features);
        }
        let mut model = vec![0; SIZE];
        for (op, cuts) in &ops {
            match *op {
                Op::Write { sector, sectors, seed } => {
                    let data = pattern(sectors as usize * 512, seed);
                    guest.put(BUFFERS, &data);
                    prop_assert_eq!(guest.request(VIRTIO_BLK_T_OUT, sector, &pieces(data.len(), cuts, 0)), (OK, 1));
                    model[sector as usize * 512..][..data.len()].copy_from_slice(&data);
                }
                Op::Read { sector, sectors } => {
                    let len = sectors as usize * 512;
                    let result = guest.request(VIRTIO_BLK_T_IN, sector, &pieces(len, cuts, WRITE));
                    prop_assert_eq!(result, (OK, len as u32 + 1));
                    prop_assert!(guest.queues[0].bytes(BUFFERS, len) == model[sector as usize * 512..][..len]);
                }
                Op::Zero { sector, sectors, kind, flags } => {
                    guest.put(BUFFERS, &segment(sector, sectors as u32, flags));
                    let (status, len) = guest.request(kind, 0, &pieces(16, cuts, 0));
                    prop_assert_eq!(len, 1);
                    if status == OK {
                        model[sector as usize * 512..][..sectors as usize * 512].fill(0);
                    } else {
                        let lacks = kind == VIRTIO_BLK_T_DISCARD && !has(features, VIRTIO_BLK_F_DISCARD);
                        prop_assert!(status == UNSUPP && lacks);
                    }
                }
                Op::Flush => prop_assert_eq!(guest.request(VIRTIO_BLK_T_FLUSH, 0, &[]), (OK, 1)),
                Op::Restart => {
                    guest.stop();
                    guest.start_with(features);
                }
            }
        }
        prop_assert!(guest.image() == model);
    }
}
