//! Connections without a greeting yet, in a fixed number of slots.

use std::time::{Duration, Instant};

use super::stranger::Stranger;
use crate::migration::wire::Greeting;

/// Number of slots. When they are full, a new connection replaces an old one.
pub(super) const SLOTS: usize = 32;
/// Minimum time for a silent peer in a slot: its first byte may be in flight.
const TURN: Duration = Duration::from_millis(50);
/// Minimum time for a peer that has sent bytes.
const GRACE: Duration = Duration::from_secs(1);

/// A refused peer, with the reason.
pub(super) type Refused = (Stranger, String);

/// The connections, oldest first.
#[derive(Debug, Default)]
pub(super) struct Slots(Vec<Stranger>);

impl Slots {
    /// Returns the connections, oldest first.
    pub(super) fn all(&self) -> &[Stranger] {
        &self.0
    }

    /// True if a slot is free, or a connection can be replaced.
    pub(super) fn have_room(&self, now: Instant) -> bool {
        self.0.len() < SLOTS || self.next_to_go(now).is_some()
    }

    /// Index of the connection to replace: the oldest silent one, otherwise the oldest, each past its minimum time.
    fn next_to_go(&self, now: Instant) -> Option<usize> {
        let silent = self.0.iter().position(|stranger| stranger.is_silent() && stranger.age(now) >= TURN);
        silent.or_else(|| self.0.iter().position(|stranger| stranger.age(now) >= GRACE))
    }

    /// Adds a connection. Returns a replaced one.
    pub(super) fn add(&mut self, stranger: Stranger, now: Instant) -> Option<Refused> {
        let full = self.0.len() >= SLOTS;
        let goes = full.then(|| self.next_to_go(now).map(|index| self.0.remove(index))).flatten();
        if full && goes.is_none() {
            return Some((stranger, "too many connections without a greeting".to_string()));
        }
        self.0.push(stranger);
        goes.map(|stranger| (stranger, "it had sent no greeting when others connected".to_string()))
    }

    /// Reads once from each ready connection. Removes and returns those with a complete greeting, and those that are
    /// refused.
    pub(super) fn advance(&mut self, is_ready: &[bool], now: Instant) -> (Vec<(Stranger, Greeting)>, Vec<Refused>) {
        let (mut greeted, mut refused) = (Vec::new(), Vec::new());
        for (index, mut stranger) in std::mem::take(&mut self.0).into_iter().enumerate() {
            let heard = if is_ready.get(index) == Some(&true) { stranger.advance(now) } else { Ok(None) };
            match heard {
                Ok(Some(greeting)) => greeted.push((stranger, greeting)),
                Ok(None) if stranger.is_late(now) => refused.push((stranger, "the peer took too long".to_string())),
                Ok(None) => self.0.push(stranger),
                Err(why) => refused.push((stranger, why)),
            }
        }
        (greeted, refused)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::migration::transport::Stream;

    fn connected(slots: &mut Slots, now: Instant) -> (UnixStream, Option<Refused>) {
        let (peer, own) = UnixStream::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        let gone = slots.add(Stranger::new(Stream::Unix(own), None, now).unwrap(), now);
        (peer, gone)
    }

    /// True once the other end of `peer` is closed; a child of another test may hold it for a moment.
    fn closes(peer: &UnixStream) -> bool {
        let until = Instant::now() + Duration::from_secs(60);
        while !is_closed(peer) && Instant::now() < until {
            std::thread::yield_now();
        }
        is_closed(peer)
    }

    /// True if the other end of `peer` is closed.
    fn is_closed(peer: &UnixStream) -> bool {
        peer.set_nonblocking(true).unwrap();
        rustix::net::recv(peer, &mut [0; 1][..], rustix::net::RecvFlags::PEEK).is_ok_and(|(count, _)| count == 0)
    }

    #[test]
    fn the_oldest_silent_peer_gives_way_and_one_that_talks_stays() {
        let (mut slots, now) = (Slots::default(), Instant::now());
        let mut peers: Vec<_> = (0..SLOTS).map(|_| connected(&mut slots, now).0).collect();
        peers[0].write_all(b"C").unwrap();
        let (greeted, refused) = slots.advance(&[true; SLOTS], now);
        assert!(greeted.is_empty() && refused.is_empty());
        assert!(!slots.have_room(now));
        for index in 1..=15 {
            let now = now + TURN * index as u32;
            assert!(slots.have_room(now));
            let (peer, gone) = connected(&mut slots, now);
            peers.push(peer);
            drop(gone.unwrap());
            assert!(closes(&peers[index]) && !is_closed(&peers[0]) && !is_closed(&peers[index + 1]), "{index}");
            assert_eq!(slots.all().len(), SLOTS);
        }
    }

    #[test]
    fn a_peer_that_talks_gives_way_only_after_its_time_of_grace() {
        let (mut slots, now) = (Slots::default(), Instant::now());
        let mut peers: Vec<_> = (0..SLOTS).map(|_| connected(&mut slots, now).0).collect();
        peers.iter_mut().for_each(|peer| peer.write_all(b"C").unwrap());
        slots.advance(&[true; SLOTS], now);
        assert!(!slots.have_room(now + GRACE / 2));
        assert!(connected(&mut slots, now + GRACE / 2).1.unwrap().1.contains("too many"));
        assert!(slots.have_room(now + GRACE));
        let (_peer, gone) = connected(&mut slots, now + GRACE);
        drop(gone.unwrap());
        assert!(closes(&peers[0]) && !is_closed(&peers[1]));
    }

    #[test]
    fn silence_ends_after_a_second_and_a_greeting_after_five() {
        let (mut slots, now) = (Slots::default(), Instant::now());
        let ((mut talks, _), _silent) = (connected(&mut slots, now), connected(&mut slots, now));
        talks.write_all(b"C").unwrap();
        let late = |slots: &mut Slots, seconds| slots.advance(&[true; 2], now + Duration::from_secs(seconds)).1.len();
        assert_eq!([late(&mut slots, 0), late(&mut slots, 1), late(&mut slots, 4), late(&mut slots, 5)], [0, 1, 0, 1]);
        assert!(slots.all().is_empty());
    }
}
