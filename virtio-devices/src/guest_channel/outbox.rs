//! Messages that wait for the guest's program to read them.

use std::collections::VecDeque;

use crate::StateError;
use crate::state::hex_bytes::HexBytes;
use crate::state::{self, OutboxState};

/// The most bytes of a reply or notice, with its newline.
pub const MAX_MESSAGE: usize = state::MAX_MESSAGE;

/// Messages in order, of which the first may have been read in part.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    messages: VecDeque<Vec<u8>>,
    /// Bytes of the first message that the driver has.
    sent: usize,
}

impl Outbox {
    /// Number of messages that the driver does not have in full.
    pub(super) fn len(&self) -> usize {
        self.messages.len()
    }

    /// Appends a message. One that is empty or longer than [`MAX_MESSAGE`] is left out: the host sends none.
    pub(super) fn push(&mut self, message: Vec<u8>) {
        debug_assert!(!message.is_empty() && message.len() <= MAX_MESSAGE, "{} bytes", message.len());
        if !message.is_empty() && message.len() <= MAX_MESSAGE {
            self.messages.push_back(message);
        }
    }

    /// Drops the oldest message of which the driver has nothing.
    pub(super) fn drop_oldest(&mut self) {
        self.messages.remove(usize::from(self.sent > 0));
    }

    /// Drops all messages.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Fills `part` with the next bytes. Returns their number.
    pub(super) fn take(&mut self, part: &mut [u8]) -> usize {
        let mut done = 0;
        while let (Some(first), Some(room)) =
            (self.messages.front(), part.get_mut(done..).filter(|room| !room.is_empty()))
        {
            let rest = first.get(self.sent..).unwrap_or_default();
            let len = rest.len().min(room.len());
            room.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
            (done, self.sent) = (done + len, self.sent + len);
            if self.sent >= first.len() {
                self.messages.pop_front();
                self.sent = 0;
            }
        }
        done
    }

    /// The messages as saved.
    pub(super) fn save(&self) -> OutboxState {
        let messages = self.messages.iter().map(|message| HexBytes(message.clone())).collect();
        OutboxState { messages, sent: u32::try_from(self.sent).unwrap_or(u32::MAX) }
    }

    /// The messages of a saved state, at most `most`.
    ///
    /// # Errors
    ///
    /// Fails if there cannot be such messages.
    pub(super) fn of(state: &OutboxState, most: usize) -> Result<Self, StateError> {
        let OutboxState { messages, sent } = state;
        let sent = usize::try_from(*sent).unwrap_or(usize::MAX);
        let first = messages.first().map_or(1, |HexBytes(first)| first.len());
        let can_be = messages.len() <= most
            && messages.iter().all(|HexBytes(message)| (1..=MAX_MESSAGE).contains(&message.len()))
            && sent < first
            && !(messages.is_empty() && sent > 0);
        if !can_be {
            return Err(StateError::Value("a channel's messages"));
        }
        Ok(Self { messages: messages.iter().map(|HexBytes(message)| message.clone()).collect(), sent })
    }
}
