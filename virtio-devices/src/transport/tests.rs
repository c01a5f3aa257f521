use proptest::prelude::*;

use super::*;
use crate::NO_VECTOR;

const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
const MAC: u64 = 1 << 5;
const OFFERED: u64 = VERSION_1 | EVENT_IDX | MAC;

const DEVICE_FEATURE_SELECT: u64 = 0x00;
const DEVICE_FEATURE: u64 = 0x04;
const DRIVER_FEATURE_SELECT: u64 = 0x08;
const DRIVER_FEATURE: u64 = 0x0c;
const CONFIG_MSIX_VECTOR: u64 = 0x10;
const NUM_QUEUES: u64 = 0x12;
const DEVICE_STATUS: u64 = 0x14;
const QUEUE_SELECT: u64 = 0x16;
const QUEUE_SIZE: u64 = 0x18;
const QUEUE_MSIX_VECTOR: u64 = 0x1a;
const QUEUE_ENABLE: u64 = 0x1c;
const QUEUE_NOTIFY_OFF: u64 = 0x1e;
const QUEUE_DESC: u64 = 0x20;
const QUEUE_DRIVER: u64 = 0x28;
const QUEUE_DEVICE: u64 = 0x30;

fn transport() -> Transport {
    Transport::new(EVENT_IDX | MAC, false, &[256, 128], 3).unwrap()
}

impl Transport {
    fn w8(&mut self, offset: u64, value: u8) -> Change {
        self.write(offset, &[value])
    }

    fn w16(&mut self, offset: u64, value: u16) -> Change {
        self.write(offset, &value.to_le_bytes())
    }

    fn w32(&mut self, offset: u64, value: u32) {
        assert_eq!(self.write(offset, &value.to_le_bytes()), Change::None);
    }

    fn w64(&mut self, offset: u64, value: u64) {
        self.w32(offset, Half::Low.of(value));
        self.w32(offset + 4, Half::High.of(value));
    }

    fn r(&self, offset: u64, len: usize) -> u64 {
        let mut bytes = [0; 8];
        self.read(offset, &mut bytes[..len], 7);
        u64::from_le_bytes(bytes)
    }

    fn choose(&mut self, features: u64) {
        for (select, half) in [(0, Half::Low), (1, Half::High)] {
            self.w32(DRIVER_FEATURE_SELECT, select);
            self.w32(DRIVER_FEATURE, half.of(features));
        }
    }

    fn negotiate(&mut self, features: u64) -> u64 {
        self.w8(DEVICE_STATUS, 1);
        self.w8(DEVICE_STATUS, 3);
        self.choose(features);
        self.w8(DEVICE_STATUS, 11);
        self.r(DEVICE_STATUS, 1)
    }

    fn set_up_queue(&mut self, queue: u16) {
        self.w16(QUEUE_SELECT, queue);
        self.w16(QUEUE_SIZE, 64);
        self.w64(QUEUE_DESC, 0x1_0000_0000 + u64::from(queue) * 0x10000);
        self.w64(QUEUE_DRIVER, 0x1_0000_1000 + u64::from(queue) * 0x10000);
        self.w64(QUEUE_DEVICE, 0x1_0000_2000 + u64::from(queue) * 0x10000);
        self.w16(QUEUE_ENABLE, 1);
    }
}

#[test]
fn a_driver_that_follows_the_standard_gets_its_queues() {
    let mut t = transport();
    assert_eq!(t.r(NUM_QUEUES, 2), 2);
    assert_eq!(t.negotiate(OFFERED), 11);
    for queue in 0..2 {
        t.w16(QUEUE_SELECT, queue);
        assert_eq!(t.r(QUEUE_SIZE, 2), if queue == 0 { 256 } else { 128 });
        assert_eq!(t.r(QUEUE_NOTIFY_OFF, 2), u64::from(queue));
        t.set_up_queue(queue);
        assert_eq!(t.r(QUEUE_ENABLE, 2), 1);
    }
    assert!(!t.ready());
    assert_eq!(t.w8(DEVICE_STATUS, 15), Change::Status);
    assert!(t.ready());
    assert_eq!(t.features(), OFFERED);

    let queues = t.queues();
    assert_eq!(queues.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 1]);
    let queue = queues[1].1.lock();
    assert_eq!((queue.size(), queue.max_size(), queue.ready()), (64, 128, true));
    assert_eq!(
        (queue.desc_table(), queue.avail_ring(), queue.used_ring()),
        (0x1_0001_0000, 0x1_0001_1000, 0x1_0001_2000)
    );
    assert!(queue.event_idx_enabled());
}

#[test]
fn features_read_in_four_words_and_nothing_beyond() {
    let mut t = transport();
    let words: Vec<_> = [0, 1, 2, 3, 4, 5, u32::MAX]
        .iter()
        .map(|select| {
            t.w32(DEVICE_FEATURE_SELECT, *select);
            t.r(DEVICE_FEATURE, 4)
        })
        .collect();
    assert_eq!(words, [OFFERED & 0xffff_ffff, OFFERED >> 32, 0, 0, 0, 0, 0]);
}

#[test]
fn a_device_cannot_offer_what_is_the_transports() {
    let t = Transport::new(u64::MAX, false, &[], 1).unwrap();
    for bit in [34, 37, 38, 39, 40, 41] {
        assert_eq!(t.offered >> bit & 1, 0, "feature {bit}");
    }
    assert_eq!(Transport::new(0, true, &[], 1).unwrap().offered, VERSION_1 | 1 << 37);
}

#[test]
fn features_ok_needs_version_1_and_nothing_that_is_not_offered() {
    for (features, accepted) in [(0, false), (MAC, false), (VERSION_1, true), (OFFERED, true), (OFFERED | 1, false)] {
        let mut t = transport();
        assert_eq!(t.negotiate(features) & 8 != 0, accepted, "{features:#x}");
        assert_eq!(t.features(), if accepted { features } else { 0 });
    }
    let mut t = transport();
    t.w32(DRIVER_FEATURE_SELECT, 2);
    t.w32(DRIVER_FEATURE, 1);
    assert_eq!(t.negotiate(OFFERED), 3, "bit 64 is not offered");
    t.w32(DRIVER_FEATURE_SELECT, 2);
    t.w32(DRIVER_FEATURE, 0);
    assert_eq!(t.negotiate(OFFERED), 11, "a driver may choose again");
}

#[test]
fn features_do_not_change_after_features_ok() {
    let mut t = transport();
    t.negotiate(VERSION_1 | MAC);
    t.choose(OFFERED);
    assert_eq!(t.features(), VERSION_1 | MAC);
    t.w32(DRIVER_FEATURE_SELECT, 0);
    assert_eq!(t.r(DRIVER_FEATURE, 4), MAC);
}

#[test]
fn driver_ok_needs_features_ok() {
    let mut t = transport();
    assert_eq!(t.w8(DEVICE_STATUS, 7), Change::Status);
    assert_eq!(t.r(DEVICE_STATUS, 1), 3);
    assert!(!t.ready());
}

#[test]
fn the_driver_cannot_take_back_a_status_bit_or_set_the_devices() {
    let mut t = transport();
    t.negotiate(OFFERED);
    assert_eq!(t.w8(DEVICE_STATUS, 1), Change::None);
    assert_eq!(t.r(DEVICE_STATUS, 1), 11);
    assert_eq!(t.w8(DEVICE_STATUS, 0x40 | 0x30), Change::None);
    assert_eq!(t.r(DEVICE_STATUS, 1), 11);
}

#[test]
fn failed_and_needs_reset_end_readiness_until_a_reset() {
    for by_device in [false, true] {
        let mut t = transport();
        t.negotiate(OFFERED);
        t.w8(DEVICE_STATUS, 15);
        if by_device {
            t.interrupts().ask_for_reset();
        } else {
            assert_eq!(t.w8(DEVICE_STATUS, 0x80), Change::Status);
        }
        assert!(!t.ready());
        t.w8(DEVICE_STATUS, 15);
        assert!(!t.ready());
        assert_eq!(t.w8(DEVICE_STATUS, 0), Change::Reset);
        t.negotiate(OFFERED);
        t.w8(DEVICE_STATUS, 15);
        assert!(t.ready());
    }
}

#[test]
fn needs_reset_is_signalled_and_stays_in_status_until_reset() {
    for worker_is_left in [false, true] {
        let mut t = transport();
        t.w16(CONFIG_MSIX_VECTOR, 0);
        t.negotiate(OFFERED);
        t.w8(DEVICE_STATUS, 15);
        let worker = worker_is_left.then(|| Arc::clone(t.interrupts()));
        t.interrupts().ask_for_reset();
        assert_eq!(t.interrupts().eventfd(0).unwrap().read().unwrap(), 1);
        assert_eq!(t.r(DEVICE_STATUS, 1), 15 | 0x40);
        t.w8(DEVICE_STATUS, 15);
        assert_eq!(t.r(DEVICE_STATUS, 1), 15 | 0x40, "the driver cannot take it back");
        t.w8(DEVICE_STATUS, 0);
        assert_eq!(t.r(DEVICE_STATUS, 1), 0);
        worker.iter().for_each(|interrupts| interrupts.ask_for_reset());
        assert_eq!(t.r(DEVICE_STATUS, 1), 0, "a worker from before the reset has nothing to ask for");
    }
}

#[test]
fn a_queue_is_fixed_once_it_is_enabled() {
    let mut t = transport();
    t.set_up_queue(0);
    t.w16(QUEUE_SIZE, 8);
    t.w64(QUEUE_DESC, 0);
    t.w16(QUEUE_ENABLE, 0);
    assert_eq!((t.r(QUEUE_SIZE, 2), t.r(QUEUE_DESC + 4, 4), t.r(QUEUE_ENABLE, 2)), (64, 1, 1));
}

#[test]
fn queues_are_not_configured_after_driver_ok() {
    let mut t = transport();
    t.negotiate(OFFERED);
    t.w8(DEVICE_STATUS, 15);
    t.set_up_queue(0);
    assert_eq!((t.r(QUEUE_SIZE, 2), t.r(QUEUE_DESC + 4, 4), t.r(QUEUE_ENABLE, 2)), (256, 0, 0));
    assert!(t.queues().is_empty());
}

#[test]
fn a_queue_size_is_a_power_of_two_up_to_the_largest() {
    let mut t = transport();
    for (size, reads) in [(0, 256), (3, 256), (512, 256), (0xffff, 256), (1, 1), (256, 256)] {
        t.w16(QUEUE_SIZE, size);
        assert_eq!(t.r(QUEUE_SIZE, 2), reads, "after {size}");
    }
}

#[test]
fn only_1_enables_a_queue_and_only_if_it_is_aligned() {
    let mut t = transport();
    for value in [0, 2, 3, 0x100, 0xffff] {
        t.w16(QUEUE_ENABLE, value);
        assert_eq!(t.r(QUEUE_ENABLE, 2), 0, "after {value}");
    }
    for (register, misaligned) in [(QUEUE_DESC, 8), (QUEUE_DRIVER, 1), (QUEUE_DEVICE, 2)] {
        let mut t = transport();
        t.w64(register, misaligned);
        t.w16(QUEUE_ENABLE, 1);
        assert_eq!(t.r(QUEUE_ENABLE, 2), 0);
        t.w64(register, 0x1000);
        t.w16(QUEUE_ENABLE, 1);
        assert_eq!(t.r(QUEUE_ENABLE, 2), 1);
    }
}

#[test]
fn a_queue_that_does_not_exist_has_size_0_and_no_vector() {
    let mut t = transport();
    for queue in [2, 0xffff] {
        t.set_up_queue(queue);
        t.w16(QUEUE_MSIX_VECTOR, 0);
        for offset in (QUEUE_SIZE..0x38).step_by(2) {
            let expected = if offset == QUEUE_MSIX_VECTOR { NO_VECTOR } else { 0 };
            assert_eq!(t.r(offset, 2), u64::from(expected), "queue {queue}, offset {offset:#x}");
        }
    }
}

#[test]
fn vectors_map_and_a_vector_beyond_the_table_reads_back_as_none() {
    let mut t = transport();
    assert_eq!(t.w16(CONFIG_MSIX_VECTOR, 0), Change::Vectors);
    t.w16(QUEUE_SELECT, 1);
    assert_eq!(t.w16(QUEUE_MSIX_VECTOR, 2), Change::Vectors);
    assert_eq!((t.r(CONFIG_MSIX_VECTOR, 2), t.r(QUEUE_MSIX_VECTOR, 2)), (0, 2));
    t.w16(QUEUE_MSIX_VECTOR, 3);
    assert_eq!(t.r(QUEUE_MSIX_VECTOR, 2), u64::from(NO_VECTOR));
}

#[test]
fn signal_from_a_worker_that_predates_the_reset_is_ignored() {
    let mut t = transport();
    let old = Arc::clone(t.interrupts());
    t.w8(DEVICE_STATUS, 0);
    old.signal_queue(0);
    assert_eq!(t.interrupts().take_isr(), 0);
}

#[test]
fn impossible_queues_are_refused() {
    for size in [0, 3, 32769, 0xffff] {
        let error = Transport::new(0, false, &[256, size], 1).unwrap_err();
        assert_eq!(error, QueueError::Size { queue: 1, size });
    }
    assert_eq!(Transport::new(0, false, &[1; 65536], 1).unwrap_err(), QueueError::Count(65536));
    assert!(Transport::new(0, false, &[32768], 1).is_ok());
}

fn image(t: &Transport) -> Vec<u64> {
    let wide = (0..Register::SPACE).step_by(4).map(|offset| t.r(offset, 4));
    let narrow = (0..Register::SPACE).step_by(2).map(|offset| t.r(offset, 2));
    wide.chain(narrow).chain([t.r(DEVICE_STATUS, 1), t.r(DEVICE_STATUS + 1, 1)]).collect()
}

proptest! {
    #[test]
    fn any_accesses_keep_the_rules(
        accesses in prop::collection::vec((0u64..0x48, prop::collection::vec(any::<u8>(), 0..9)), 0..200),
    ) {
        let mut t = transport();
        for (offset, data) in accesses {
            let features = t.features();
            let ready = t.ready();
            let enabled: Vec<_> = t.queues.iter().filter(|queue| queue.enabled).copied().collect();
            let change = t.write(offset, &data);
            t.read(offset, &mut data.clone(), 0);

            if change == Change::Reset {
                prop_assert_eq!(image(&t), image(&transport()));
            } else {
                prop_assert!(features == 0 || features == t.features());
                prop_assert!(t.queues.iter().filter(|queue| enabled.contains(queue)).count() >= enabled.len());
            }
            prop_assert!(ready == t.ready() || matches!(change, Change::Status | Change::Reset));
            prop_assert!(!t.ready() || t.features() & VERSION_1 != 0);
            prop_assert_eq!(t.features() & !t.offered, 0);
            let runnable = t.queues.iter().filter(|queue| queue.enabled).count();
            prop_assert_eq!(t.queues().len(), runnable);
            prop_assert!(t.queues.iter().all(|q| q.size.is_power_of_two() && q.size <= q.max_size));
        }
    }
}

#[test]
fn a_feature_without_one_that_it_needs_is_not_accepted() {
    const fn needs(feature: u32) -> FeatureRequirement {
        FeatureRequirement { feature, any_of: 1 << 50, enforced: true, text: "" }
    }
    const NEEDS: &[FeatureRequirement] = &[needs(51), needs(52)];
    let requiring = || Transport::new(0b111 << 50, false, &[256], 2).unwrap().requiring(NEEDS);
    for (chosen, accepted) in [(0b001, true), (0b010, false), (0b100, false), (0b111, true), (0, true), (0b110, false)]
    {
        let expected = if accepted { 11 } else { 3 };
        assert_eq!(requiring().negotiate(VERSION_1 | chosen << 50), expected, "{chosen:#b}");
    }
}

/// virtio 1.4 §6.1: a device behind an IOMMU accepts no driver that would use physical addresses.
#[test]
fn required_feature_is_offered_and_drivers_without_it_refused() {
    const ACCESS_PLATFORM: u64 = 1 << 33;
    let mut transport = transport();
    transport.require(33);
    transport.w32(DEVICE_FEATURE_SELECT, 1);
    assert_eq!(transport.r(DEVICE_FEATURE, 4), (VERSION_1 | ACCESS_PLATFORM) >> 32);
    assert_eq!(transport.negotiate(OFFERED) & 8, 0);
    transport.w8(DEVICE_STATUS, 0);
    assert_eq!(transport.negotiate(OFFERED | ACCESS_PLATFORM) & 8, 8, "after a reset, too");
    transport.w8(DEVICE_STATUS, 0);
    assert_eq!(transport.negotiate(OFFERED) & 8, 0);
}
