//! The host's clock, as read by the queue's requests.

use std::time::{SystemTime, UNIX_EPOCH};

use super::counters::{RtcCounter, Tally};
use super::requests::{HEAD, LONGEST_REQUEST, answer};
use crate::device::queue_worker::{ChainContext, ChainResult, QueueHandler};
use crate::queue::iovecs::{IoVecs, divide};
use crate::queue::ring::Chain;

/// Answers requests.
pub(super) struct Clock;

impl QueueHandler for Clock {
    type Tally = Tally;

    fn answer<'m>(&mut self, chain: Chain<'m>, context: ChainContext<'_, 'm, Tally>) -> ChainResult {
        let ChainContext { memory, storage: [readable, writable], tally, .. } = context;
        let (mut asked, mut reply) = (IoVecs::new(readable), IoVecs::new(writable));
        let room = divide(memory, chain, &mut asked, &mut reply).map_or(0, |()| reply.bytes());
        if room < HEAD {
            tally.count(RtcCounter::BadChains);
            return ChainResult::Used(0);
        }
        let mut request = [0; LONGEST_REQUEST];
        let len = asked.read_at(0, &mut request);
        let answer = answer(&request[..len], room, now());
        tally.count(answer.counter);
        // At most a reply's length.
        ChainResult::Used(reply.write_at(0, answer.bytes()) as u32)
    }
}

/// The host's UTC, in nanoseconds since 1970; 0 for an earlier time.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
