//! Statistics that a data path counts.

use crate::effects::Direction;
use crate::nic::Nic;
use crate::queue::QUEUES;
use crate::shape::TOTAL_VFS;
use crate::spec;

/// A statistic of the whole NIC. Software clears it by reading; it stops at its largest value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Counter {
    /// GPRC: good frames received.
    FramesReceived,
    /// GORC: bytes of good frames received, 36 bits.
    BytesReceived,
    /// BPRC: broadcasts received.
    BroadcastsReceived,
    /// MPRC: groups received.
    GroupsReceived,
    /// GPTC: good frames sent.
    FramesSent,
    /// GOTC: bytes of good frames sent, 36 bits.
    BytesSent,
    /// MPC: frames that were missed because there was no room.
    Missed,
    /// SSVPC: frames that a spoof check dropped.
    Spoofed,
    /// FDIRMATCH: frames that a flow rule matched.
    FlowMatched,
    /// FDIRMISS: frames that no flow rule matched, while rules are active.
    FlowMissed,
}

/// A counter of a VF. It wraps, and no read clears it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VfCounter {
    /// VFGPRC: good frames received, 32 bits.
    FramesReceived,
    /// VFGORC: bytes of good frames received, 36 bits.
    BytesReceived,
    /// VFMPRC: groups received, 32 bits.
    GroupsReceived,
    /// VFGPTC: good frames sent, 32 bits.
    FramesSent,
    /// VFGOTC: bytes of good frames sent, 36 bits.
    BytesSent,
}

const BITS_32: u64 = u32::MAX as u64;
const BITS_36: u64 = (1 << 36) - 1;

impl Nic {
    /// Adds to a statistic.
    pub fn count(&mut self, counter: Counter, amount: u64) {
        let (low, high) = match counter {
            Counter::FramesReceived => (0x4074, None),
            Counter::BytesReceived => (0x4088, Some(0x408c)),
            Counter::BroadcastsReceived => (0x4078, None),
            Counter::GroupsReceived => (0x407c, None),
            Counter::FramesSent => (0x4080, None),
            Counter::BytesSent => (0x4090, Some(0x4094)),
            Counter::Missed => (0x3fa0, None),
            Counter::Spoofed => (spec::SSVPC, None),
            Counter::FlowMatched => (spec::FDIRMATCH, None),
            Counter::FlowMissed => (spec::FDIRMISS, None),
        };
        self.count_up(low, high, amount);
    }

    /// Adds good frames, and their bytes, to the statistics of the counter that `queue`, 0 to 127, is mapped to: QPRC
    /// and QBRC by RQSMR, or QPTC and QBTC by TQSM. Without a mapping, that is counter 0. They are cleared and stop as
    /// those of the whole NIC.
    pub fn count_queue(&mut self, direction: Direction, queue: u16, frames: u64, bytes: u64) {
        let (number, place) = (u32::from(queue.min(QUEUES - 1)), usize::from(queue % 4));
        let counter_by = |map: u32| {
            let counters = self.registers.get(map + number / 4 * 4).to_le_bytes();
            u32::from(counters.get(place).copied().unwrap_or(0) & 0xf)
        };
        let (of_frames, low, high) = match direction {
            Direction::Receive => {
                let at = 0x40 * counter_by(spec::RQSMR);
                (spec::QPRC + at, spec::QBRC_L + at, spec::QBRC_H + at)
            }
            Direction::Transmit => {
                let n = counter_by(spec::TQSM);
                (spec::QPTC + 4 * n, spec::QBTC_L + 8 * n, spec::QBTC_H + 8 * n)
            }
        };
        self.count_up(of_frames, None, frames);
        self.count_up(low, Some(high), bytes);
    }

    /// Adds to a number that stops at its largest value: 32 bits, or 36 in two registers.
    fn count_up(&mut self, low: u32, high: Option<u32>, amount: u64) {
        let largest = if high.is_some() { BITS_36 } else { BITS_32 };
        let value = self.counted(low, high).saturating_add(amount).min(largest);
        self.set_counted(low, high, value);
    }

    /// Adds to a counter of VF `index`.
    pub fn count_vf(&mut self, index: u16, counter: VfCounter, amount: u64) {
        let vf = u32::from(index.min(TOTAL_VFS - 1));
        let (low, high) = match counter {
            VfCounter::FramesReceived => (0x101c + 0x40 * vf, None),
            VfCounter::BytesReceived => (0x1020 + 0x40 * vf, Some(0xd020 + 0x40 * vf)),
            VfCounter::GroupsReceived => (0xd01c + 0x40 * vf, None),
            VfCounter::FramesSent => (0x8300 + 4 * vf, None),
            VfCounter::BytesSent => (0x8400 + 8 * vf, Some(0x8404 + 8 * vf)),
        };
        let mask = if high.is_some() { BITS_36 } else { BITS_32 };
        let value = self.counted(low, high).wrapping_add(amount) & mask;
        self.set_counted(low, high, value);
    }

    fn counted(&self, low: u32, high: Option<u32>) -> u64 {
        let get = |offset| u64::from(self.registers.get(offset));
        get(low) | high.map_or(0, get) << 32
    }

    #[expect(clippy::cast_possible_truncation, reason = "the halves of a number")]
    fn set_counted(&mut self, low: u32, high: Option<u32>, value: u64) {
        self.registers.set(low, value as u32);
        if let Some(high) = high {
            self.registers.set(high, (value >> 32) as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mac, Place};

    fn read(nic: &mut Nic, place: Place, offset: u64) -> u32 {
        let mut data = [0; 4];
        nic.read(place, offset, &mut data);
        u32::from_le_bytes(data)
    }

    /// X24: statistics.
    #[test]
    fn a_statistic_stops_at_its_largest_value_and_a_read_clears_it() {
        let mut nic = Nic::new(Mac::default());
        for (counter, low, high) in [
            (Counter::FramesReceived, 0x4074, None),
            (Counter::BytesReceived, 0x4088, Some(0x408c)),
            (Counter::BroadcastsReceived, 0x4078, None),
            (Counter::GroupsReceived, 0x407c, None),
            (Counter::FramesSent, 0x4080, None),
            (Counter::BytesSent, 0x4090, Some(0x4094)),
            (Counter::Missed, 0x3fa0, None),
            (Counter::Spoofed, 0x8780, None),
            (Counter::FlowMatched, 0xee58, None),
            (Counter::FlowMissed, 0xee5c, None),
        ] {
            nic.count(counter, 5);
            assert_eq!([5, 0], [0; 2].map(|_| read(&mut nic, Place::Pf, low)), "{counter:?}");
            nic.count(counter, u64::MAX);
            nic.count(counter, 1);
            assert_eq!(read(&mut nic, Place::Pf, low), u32::MAX);
            assert!(high.is_none_or(|high| read(&mut nic, Place::Pf, high) == 0xf));
        }
    }

    fn write(nic: &mut Nic, offset: u64, value: u32) {
        let _ = nic.write(Place::Pf, offset, &value.to_le_bytes());
    }

    /// The statistics of a counter, which are read and so cleared: frames, and the halves of their bytes.
    fn of_counter(nic: &mut Nic, direction: Direction, n: u64) -> [u32; 3] {
        let [frames, low, high] = match direction {
            Direction::Receive => [0x1030, 0x1034, 0x1038].map(|first| first + 0x40 * n),
            Direction::Transmit => [0x8680 + 4 * n, 0x8700 + 8 * n, 0x8704 + 8 * n],
        };
        [frames, low, high].map(|offset| read(nic, Place::Pf, offset))
    }

    /// X24: statistics.
    #[test]
    fn all_queues_count_in_counter_0_until_they_are_mapped() {
        let mut nic = Nic::new(Mac::default());
        for direction in [Direction::Receive, Direction::Transmit] {
            for queue in [0, 5, 64, 127, 128] {
                nic.count_queue(direction, queue, 2, 1 << 32);
            }
            assert_eq!(of_counter(&mut nic, direction, 0), [10, 0, 5], "{direction:?}");
            assert_eq!(of_counter(&mut nic, direction, 0), [0; 3], "a read clears them");
            assert!((1..16).all(|n| of_counter(&mut nic, direction, n) == [0; 3]));
        }
        nic.count_queue(Direction::Transmit, 0, u64::MAX, u64::MAX);
        assert_eq!(read(&mut nic, Place::Pf, 0x6030), u32::MAX, "the older place of QPTC 0");
        assert_eq!(of_counter(&mut nic, Direction::Transmit, 0), [0, u32::MAX, 0xf]);
    }

    /// X24: statistics.
    #[test]
    fn a_queue_counts_in_the_counter_that_it_is_mapped_to() {
        for (direction, map) in [(Direction::Receive, 0x2300), (Direction::Transmit, 0x8600)] {
            let mut nic = Nic::new(Mac::default());
            // Queue 6 in counter 15, and queue 127 in counter 3.
            write(&mut nic, map + 4, 0xff << 16);
            write(&mut nic, map + 4 * 31, 3 << 24);
            for (queue, frames) in [(5, 1), (6, 2), (7, 4), (127, 8)] {
                nic.count_queue(direction, queue, frames, 60 * frames);
            }
            let state = nic.save();
            let mut restored = Nic::new(Mac::default());
            restored.restore(&state).unwrap();
            for mut nic in [nic, restored] {
                let all: Vec<_> = (0..16).map(|n| of_counter(&mut nic, direction, n)).collect();
                assert_eq!((all[0], all[3], all[15]), ([5, 300, 0], [8, 480, 0], [2, 120, 0]), "{direction:?}");
                assert_eq!(all.iter().filter(|counted| **counted == [0; 3]).count(), 13);
                nic.count_queue(direction, 6, 1, 1);
                write(&mut nic, 0, 1 << 26);
                assert_eq!(of_counter(&mut nic, direction, 15), [0; 3], "a reset clears them");
                nic.count_queue(direction, 6, 1, 1);
                assert_eq!(of_counter(&mut nic, direction, 0), [1, 1, 0], "and the map");
            }
        }
    }

    /// X24: statistics.
    #[test]
    fn a_counter_of_a_vf_wraps_and_both_functions_read_it() {
        let mut nic = Nic::new(Mac::default());
        for (counter, vf, pf) in [
            (VfCounter::FramesReceived, 0x101c, 0x101c + 0x40 * 5),
            (VfCounter::BytesReceived, 0x1020, 0x1020 + 0x40 * 5),
            (VfCounter::GroupsReceived, 0x1034, 0xd01c + 0x40 * 5),
            (VfCounter::FramesSent, 0x201c, 0x8300 + 4 * 5),
            (VfCounter::BytesSent, 0x2020, 0x8400 + 8 * 5),
        ] {
            nic.count_vf(5, counter, BITS_36);
            nic.count_vf(5, counter, 8);
            for _ in 0..2 {
                let both = (read(&mut nic, Place::Vf(5), vf), read(&mut nic, Place::Pf, pf));
                assert_eq!(both, (7, 7), "{counter:?}");
            }
            assert_eq!(read(&mut nic, Place::Vf(4), vf), 0);
        }
    }
}
