//! Frames for tests of the crate and from outside it.

/// The length of a frame's header.
const HEADER: usize = 12;
pub(crate) const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
pub(crate) const OTHER: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];

/// A frame of `len` bytes to `to`, with a payload of varying bytes.
pub(crate) fn frame(to: [u8; 6], len: usize) -> Vec<u8> {
    let mut frame: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
    frame[..6].copy_from_slice(&to);
    frame[12..14].copy_from_slice(&[8, 0]);
    frame
}

/// Puts a header without offloads before `frame`.
pub(crate) fn with_header(frame: &[u8]) -> Vec<u8> {
    [&[0; HEADER], frame].concat()
}
