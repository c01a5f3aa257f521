//! Saved state of a channel.

use super::control::Owed;
use super::exchange::{DriverPart, MAX_WAITING, MAX_WAITING_NOTICES};
use super::lines::{MAX_LINE, Splitter};
use super::outbox::Outbox;
use super::ports::MAX_CHAIN;
use crate::StateError;
use crate::state::ChannelState;
use crate::state::hex_bytes::HexBytes;

impl DriverPart {
    /// The state as saved.
    pub(super) fn save(&self) -> ChannelState {
        ChannelState {
            owed: self.owed.bits(),
            open: self.open,
            taken: u32::try_from(self.taken).unwrap_or(u32::MAX),
            half: HexBytes(self.splitter.half().to_vec()),
            skips: self.splitter.skips(),
            lines: self.lines.iter().map(|line| line.clone().map(HexBytes)).collect(),
            replies: self.replies.save(),
            notices: self.notices.save(),
        }
    }

    /// Restores a saved state.
    ///
    /// # Errors
    ///
    /// Fails, without a change, if no driver could have caused it.
    pub(super) fn restore(&mut self, state: &ChannelState) -> Result<(), StateError> {
        let ChannelState { owed, open, taken, half: HexBytes(half), skips, lines, replies, notices } = state;
        let wrong = || StateError::Value("a channel");
        let is_line = |line: &Option<HexBytes<MAX_LINE>>| {
            line.as_ref().is_none_or(|HexBytes(line)| line.len() < MAX_LINE && !line.contains(&b'\n'))
        };
        let restored = Self {
            owed: Owed::from_bits(*owed).ok_or_else(wrong)?,
            open: *open,
            taken: usize::try_from(*taken).ok().filter(|taken| *taken < MAX_CHAIN).ok_or_else(wrong)?,
            splitter: Splitter::of(half.clone(), *skips).ok_or_else(wrong)?,
            replies: Outbox::of(replies, MAX_WAITING)?,
            notices: Outbox::of(notices, MAX_WAITING_NOTICES)?,
            lines: Default::default(),
        };
        let has_session = *taken != 0 || !half.is_empty() || *skips || !lines.is_empty() || restored.replies.len() > 0;
        if lines.len() + restored.replies.len() > MAX_WAITING
            || !lines.iter().all(is_line)
            || (has_session && !open[0])
            || (restored.notices.len() > 0 && !open[1])
        {
            return Err(wrong());
        }
        let lines = lines.iter().map(|line| line.as_ref().map(|HexBytes(line)| line.clone())).collect();
        *self = Self { lines, ..restored };
        Ok(())
    }
}
