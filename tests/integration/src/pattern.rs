//! Bytes that identify their position, for both ends of a connection.

use std::io::Read;

/// The number of bytes in a part.
pub const PART: usize = 64 << 10;

/// Part `number` of a pattern of `bytes` bytes.
pub fn part(number: usize, bytes: usize) -> Vec<u8> {
    let len = bytes.saturating_sub(number * PART).min(PART);
    // xorshift64: parts and bytes do not repeat.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(number as u64 + 1);
    let words = std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    });
    words.take(len.div_ceil(8)).flatten().take(len).collect()
}

/// Reads a pattern of `bytes` bytes.
///
/// # Panics
///
/// Panics if it ends too early, or differs.
pub fn check(from: &mut impl Read, bytes: usize) {
    for number in 0..bytes.div_ceil(PART) {
        let expected = part(number, bytes);
        let mut read = vec![0; expected.len()];
        from.read_exact(&mut read).unwrap_or_else(|error| panic!("part {number}: {error}"));
        assert!(read == expected, "part {number} is not what was sent");
    }
}
