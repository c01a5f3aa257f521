//! Bounds and the price of walking the descriptors of frames. A chain may have as many descriptors without a byte as
//! its table holds, so a frame's bytes do not say how much work its buffers are.

use crate::DmaView;
use crate::iovecs::Bounds;
use crate::net_protocol::MAX_READ;

/// The most descriptors that are read for one frame on either side: 64 KiB in pieces of 65 bytes. Drivers use some 50.
const MOST: usize = 1024;
/// The same where each piece of memory is looked up in an IOMMU's mappings.
const MOST_TRANSLATED: usize = 512;
/// The most descriptors that are read for all segments that a switch makes of a frame: 19 for each of 150.
const MOST_OF_SEGMENTS: usize = 3072;
/// The same where each piece of memory is looked up.
const MOST_OF_SEGMENTS_TRANSLATED: usize = 1024;
/// A descriptor's price, in bytes that are copied in the same time.
const PRICE: usize = 48;
/// The same of one whose memory is looked up.
const PRICE_TRANSLATED: usize = 192;
/// The descriptors of a frame that its own price covers, beside those for its bytes.
const FREE: usize = 8;
/// The bytes of a frame for which its price covers a further descriptor.
const BYTES: usize = 64;
/// The most that a batch of frames costs before it ends, in bytes, not counting its last frame. A copy of so many takes
/// 100 us where they are in no cache; it and the longest frame, with all descriptors that are read for it, take less
/// than 200 us. A round's credit of a port of the usual weight is less.
pub(crate) const BATCH_COST: usize = 192 << 10;
/// The same for a queue over a tap, whose worker has no other: it costs system calls, so that shorter batches would be
/// slower. For as long the host waits at most when it changes what the NIC may do.
pub(crate) const TAP_BATCH_COST: usize = 512 << 10;

/// The most descriptors of one frame's buffers in `memory`. A chain of more is refused; a receive ring of which one
/// frame needs more is invalid.
pub(crate) fn most(memory: &DmaView) -> usize {
    if memory.is_translated() { MOST_TRANSLATED } else { MOST }
}

/// The bounds of a chain of one frame in `memory`. One that is longer than any frame is seen to be so.
pub(crate) fn bounds(memory: &DmaView) -> Bounds {
    Bounds { pieces: most(memory), enough: MAX_READ + 1 }
}

/// The most descriptors of the buffers of all segments that a switch makes of one frame. Segments for which it would be
/// more are lost.
pub(crate) fn most_of_segments(memory: &DmaView) -> usize {
    if memory.is_translated() { MOST_OF_SEGMENTS_TRANSLATED } else { MOST_OF_SEGMENTS }
}

/// The price of reading `walked` descriptors in `memory` for a frame of `bytes`, beyond what any frame of that length
/// costs.
pub(crate) fn price(walked: usize, bytes: usize, memory: &DmaView) -> usize {
    let further = walked.saturating_sub(FREE + bytes / BYTES);
    further.saturating_mul(if memory.is_translated() { PRICE_TRANSLATED } else { PRICE })
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;
    use crate::GuestMap;

    #[test]
    fn usual_buffers_of_a_frame_cost_nothing_more() {
        let memory = DmaView::identity(&GuestMap::from_ranges(&[(GuestAddress(0), 4096)]).unwrap());
        // Pages, buffers of a usual frame's length, one buffer, and small ones.
        for (walked, bytes) in [(19, 65_549), (43, 65_549), (8, 60), (512, 65_549)] {
            assert_eq!(price(walked, bytes, &memory), 0, "{walked} {bytes}");
        }
        assert_eq!(price(1022, 1514, &memory), (1022 - 8 - 23) * PRICE);
    }
}
