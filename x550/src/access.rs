//! Bytes of an access as dwords.
//!
//! Registers are dwords. A read returns the bytes that it covers, and has the side effects of each dword that it
//! touches, once. A write changes the dwords that it covers completely; the NIC drops other bytes, because it
//! supports no byte enables but all (`Memory-Mapped Access`). So an access of 8 bytes is two of 4, the lower one first,
//! a byte cannot be written, and a misaligned dword writes nothing.

/// The offset of each dword that `len` bytes at `offset` touch.
fn touched(offset: u32, len: usize) -> impl Iterator<Item = u32> {
    let first = offset & !3;
    let end = u32::try_from(len).map_or(u32::MAX, |len| offset.saturating_add(len));
    (first..end).step_by(4)
}

/// Reads `data` at `offset` through `dword`.
pub(crate) fn read(offset: u32, data: &mut [u8], mut dword: impl FnMut(u32) -> u32) {
    let mut place = offset & 3;
    let mut rest = data;
    for at in touched(offset, rest.len()) {
        let bytes = dword(at).to_le_bytes();
        let from = bytes.get(usize::try_from(place).unwrap_or(0)..).unwrap_or(&[]);
        let len = from.len().min(rest.len());
        let (head, tail) = rest.split_at_mut(len);
        head.iter_mut().zip(from).for_each(|(to, from)| *to = *from);
        rest = tail;
        place = 0;
    }
}

/// The dwords that `data` at `offset` covers completely, with their offsets.
pub(crate) fn written(offset: u32, data: &[u8]) -> impl Iterator<Item = (u32, u32)> {
    // A misaligned access begins in a dword that it does not cover.
    let skipped = offset.wrapping_neg() & 3;
    let whole = data.get(usize::try_from(skipped).unwrap_or(0)..).unwrap_or(&[]);
    let first = offset.saturating_add(skipped);
    whole
        .chunks_exact(4)
        .zip((first..).step_by(4))
        .map(|(bytes, at)| (at, bytes.try_into().map_or(0, u32::from_le_bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(offset: u32, len: usize) -> (Vec<u8>, Vec<u32>) {
        let (mut data, mut seen) = (vec![0; len], Vec::new());
        read(offset, &mut data, |at| {
            seen.push(at);
            u32::from_le_bytes([0, 1, 2, 3].map(|n| u8::try_from(at).unwrap() + n))
        });
        (data, seen)
    }

    /// X3: dwords.
    #[test]
    fn a_read_touches_each_dword_once() {
        assert_eq!(reading(8, 4), (vec![8, 9, 10, 11], vec![8]));
        assert_eq!(reading(8, 8), ((8..16).collect(), vec![8, 12]));
        assert_eq!(reading(9, 1), (vec![9], vec![8]));
        assert_eq!(reading(10, 2), (vec![10, 11], vec![8]));
        assert_eq!(reading(11, 2), (vec![11, 12], vec![8, 12]));
        assert_eq!(reading(7, 8), ((7..15).collect(), vec![4, 8, 12]));
        assert_eq!(reading(4, 0), (vec![], vec![]));
    }

    #[test]
    fn a_write_changes_whole_dwords_alone() {
        let writing = |offset, len| written(offset, &vec![0xff; len]).map(|(at, _)| at).collect::<Vec<_>>();
        assert_eq!(writing(8, 4), [8]);
        assert_eq!(writing(8, 8), [8, 12]);
        assert_eq!(writing(9, 8), [12], "bytes 9 to 11 and 16 are dropped");
        for (offset, len) in [(8, 1), (8, 2), (9, 4), (10, 4), (11, 4), (8, 3), (8, 0)] {
            assert_eq!(writing(offset, len), [0; 0], "{len} bytes at {offset}");
        }
        assert_eq!(written(8, &[1, 2, 3, 4]).next(), Some((8, 0x0403_0201)));
    }
}
