//! Lines of bytes that arrive in any pieces.

use crate::state;

/// The most bytes of a line, with its newline. A longer line is refused, and its rest skipped.
pub const MAX_LINE: usize = state::MAX_LINE;

/// Division of a stream of bytes into lines, with the beginning of a line that is not complete.
#[derive(Debug, Default)]
pub(super) struct Splitter {
    /// Beginning of a line; shorter than [`MAX_LINE`].
    half: Vec<u8>,
    /// True while the rest of a line is skipped that was too long.
    skips: bool,
}

/// The next step of a division.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// These many bytes, which end no line.
    Part(usize),
    /// These many bytes, the last of which ends a line.
    Line(usize),
    /// These many bytes, which make the line too long.
    TooLong(usize),
}

impl Splitter {
    /// The splitter with this beginning of a line, or in the rest of a long line; `None` if it cannot be so.
    pub(super) fn of(half: Vec<u8>, skips: bool) -> Option<Self> {
        let can_be = half.len() < MAX_LINE && !half.contains(&b'\n') && (half.is_empty() || !skips);
        can_be.then_some(Self { half, skips })
    }

    /// The beginning of a line.
    pub(super) fn half(&self) -> &[u8] {
        &self.half
    }

    /// True while a line is skipped.
    pub(super) const fn skips(&self) -> bool {
        self.skips
    }

    /// Divides `bytes`, of which there is at least one. Nothing is taken before [`Self::take`].
    pub(super) fn next(&self, bytes: &[u8]) -> Piece {
        let newline = bytes.iter().position(|byte| *byte == b'\n').map(|at| at + 1);
        if self.skips {
            return Piece::Part(newline.unwrap_or(bytes.len()));
        }
        let room = MAX_LINE - self.half.len();
        match newline {
            Some(len) if len <= room => Piece::Line(len),
            None if bytes.len() < room => Piece::Part(bytes.len()),
            _ => Piece::TooLong(room.min(bytes.len())),
        }
    }

    /// Takes the piece that [`Self::next`] found in `bytes`. Returns the line if it ends one, without its newline.
    pub(super) fn take(&mut self, piece: &Piece, bytes: &[u8]) -> Option<Vec<u8>> {
        match *piece {
            Piece::Part(len) if self.skips => {
                self.skips = bytes.get(..len).is_none_or(|part| part.last() != Some(&b'\n'));
                None
            }
            Piece::Part(len) => {
                self.half.extend(bytes.iter().take(len));
                None
            }
            Piece::Line(len) => {
                let mut line = std::mem::take(&mut self.half);
                line.extend(bytes.iter().take(len.saturating_sub(1)));
                Some(line)
            }
            Piece::TooLong(len) => {
                self.half = Vec::new();
                // The newline may be the byte that is too many.
                self.skips = bytes.get(..len).is_none_or(|part| part.last() != Some(&b'\n'));
                None
            }
        }
    }
}
