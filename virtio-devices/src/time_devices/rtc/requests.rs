//! Requests and replies: little-endian messages that begin with a head of 8 bytes.

use super::counters::RtcCounter;

/// The head of a request (a type and 6 reserved bytes), and of a reply (a status and 7 reserved bytes).
pub(super) const HEAD: usize = 8;
/// The length of the longest supported request.
pub(super) const LONGEST_REQUEST: usize = 16;
/// The length of the longest reply.
const ANSWER: usize = 16;

const READ: u16 = 0x0001;
const READ_CROSS: u16 = 0x0002;
const CONFIG: u16 = 0x1000;
const CLOCK_CAPABILITIES: u16 = 0x1001;
const CROSS_CAPABILITIES: u16 = 0x1002;

const OK: u8 = 0;
const NOT_SUPPORTED: u8 = 2;
const NO_DEVICE: u8 = 3;
const INVALID: u8 = 4;

/// The type of a clock that is UTC, whose leap seconds are not smeared.
const UTC: u8 = 0;
/// The number of clocks. The first has the ID 0.
const CLOCKS: u16 = 1;

/// Answer to a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Answer {
    bytes: [u8; ANSWER],
    len: usize,
    /// The counter to increment.
    pub counter: RtcCounter,
}

impl Answer {
    /// A reply with these bytes after its head.
    fn ok(counter: RtcCounter, body: [u8; ANSWER - HEAD]) -> Self {
        let mut bytes = [0; ANSWER];
        bytes[HEAD..].copy_from_slice(&body);
        bytes[0] = OK;
        Self { bytes, len: ANSWER, counter }
    }

    /// A head alone, with the reason.
    fn refused(status: u8) -> Self {
        let mut bytes = [0; ANSWER];
        bytes[0] = status;
        Self { bytes, len: HEAD, counter: RtcCounter::Refused }
    }

    /// Bytes of the reply.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// The reply to `request`, of which only the first [`LONGEST_REQUEST`] bytes matter, for a driver that has room for
/// `room` bytes, at least [`HEAD`]. The clock is at `now`, in nanoseconds since 1970.
pub(super) fn answer(request: &[u8], room: usize, now: u64) -> Answer {
    let answer = carry_out(request, now);
    // A truncated reply would be misread.
    if answer.len > room { Answer::refused(INVALID) } else { answer }
}

fn carry_out(request: &[u8], now: u64) -> Answer {
    let number = |at: usize| match request.get(at..at + 2) {
        Some([low, high]) => Some(u16::from_le_bytes([*low, *high])),
        _ => None,
    };
    let Some(kind) = number(0).filter(|_| request.len() >= HEAD) else { return Answer::refused(INVALID) };
    match kind {
        CONFIG => {
            let [low, high] = CLOCKS.to_le_bytes();
            return Answer::ok(RtcCounter::Requests, [low, high, 0, 0, 0, 0, 0, 0]);
        }
        READ | READ_CROSS | CLOCK_CAPABILITIES | CROSS_CAPABILITIES => {}
        // Alarms are a feature that is not offered.
        _ => return Answer::refused(NOT_SUPPORTED),
    }
    match number(HEAD) {
        _ if request.len() < LONGEST_REQUEST => return Answer::refused(INVALID),
        Some(clock) if clock < CLOCKS => {}
        _ => return Answer::refused(NO_DEVICE),
    }
    match kind {
        READ => Answer::ok(RtcCounter::Readings, now.to_le_bytes()),
        CLOCK_CAPABILITIES => Answer::ok(RtcCounter::Requests, [UTC, 0, 0, 0, 0, 0, 0, 0]),
        // No counter can be read with the clock.
        CROSS_CAPABILITIES => Answer::ok(RtcCounter::Requests, [0; ANSWER - HEAD]),
        _ => Answer::refused(NOT_SUPPORTED),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(kind: u16, clock: u16) -> [u8; LONGEST_REQUEST] {
        let mut request = [0; LONGEST_REQUEST];
        request[..2].copy_from_slice(&kind.to_le_bytes());
        request[HEAD..HEAD + 2].copy_from_slice(&clock.to_le_bytes());
        request
    }

    #[test]
    fn there_is_one_clock_which_is_utc() {
        assert_eq!(answer(&request(0x1000, 0)[..8], 64, 0).bytes(), [0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(answer(&request(0x1001, 0), 16, 0).bytes(), [0; 16]);
        assert_eq!(answer(&request(0x1002, 0), 16, 0).bytes(), [0; 16]);
        let read = answer(&request(1, 0), 16, 0x0102_0304_0506_0708);
        assert_eq!(
            (read.bytes(), read.counter),
            (&[0, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1][..], RtcCounter::Readings)
        );
    }

    #[test]
    fn a_missing_request_or_clock_is_refused_by_its_status() {
        let status = |kind, clock| answer(&request(kind, clock), 64, 1).bytes().to_vec();
        for kind in [0, 2, 3, 0x0fff, 0x1003, 0x1004, 0x1005, 0x2000, 0xffff] {
            assert_eq!(status(kind, 0), [2, 0, 0, 0, 0, 0, 0, 0], "{kind:#x}");
        }
        for kind in [1, 2, 0x1001, 0x1002] {
            assert_eq!([1, u16::MAX].map(|clock| status(kind, clock)[0]), [3, 3], "{kind:#x}");
        }
    }

    #[test]
    fn a_message_that_is_too_short_is_invalid() {
        for len in 0..16 {
            assert_eq!(answer(&request(1, 0)[..len], 64, 1).bytes(), [4, 0, 0, 0, 0, 0, 0, 0], "{len}");
        }
        for room in 8..16 {
            assert_eq!(answer(&request(1, 0), room, 1).bytes(), [4, 0, 0, 0, 0, 0, 0, 0], "{room}");
        }
    }
}
