//! Devices other than NICs over a peer: what they show of it, and their requests to it. The peer sends the buffers of
//! its second queue over the wire, as a NIC's does.

use vm_memory::Bytes;

use super::super::message::*;
use super::*;
use crate::transport::features::has;
use crate::{VhostUserDevice, VhostUserDeviceSpec, VhostUserKind, VirtioDevice};

use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::{VIRTIO_F_IN_ORDER, VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

const ID: &str = "_dev0";
/// The offsets of the write cache mode and of the number of queues in a disk's configuration.
const WRITEBACK: usize = 32;
const NUM_QUEUES: usize = 34;

/// A peer with all features and `queues` queues.
fn script(queues: usize, config: &[u8]) -> Script {
    let base = Script::new(1);
    Script { features: u64::MAX, queues, queue_num: queues as u64, config: config.to_vec(), ..base }
}

fn fs() -> VhostUserKind {
    VhostUserKind::FileSystem { tag: "kataShared".into() }
}

fn other(device_type: u16) -> VhostUserKind {
    VhostUserKind::Other { device_type }
}

/// A disk's configuration of 60 bytes, of 1,000 sectors.
fn disk_config() -> Vec<u8> {
    let mut config = vec![0; 60];
    config[..2].copy_from_slice(&1000u16.to_le_bytes());
    config[WRITEBACK] = 1;
    config[NUM_QUEUES] = 7;
    config
}

impl Rig {
    fn device(&self, kind: VhostUserKind, queues: usize) -> Result<VhostUserDevice, VhostUserError> {
        let spec = VhostUserDeviceSpec { id: ID.into(), kind, queue_sizes: vec![16; queues], socket: self.path() };
        VhostUserDevice::connect(spec, &Memory::new(self.map.clone()), None)
    }

    fn device_refusal(&self, kind: VhostUserKind, queues: usize) -> String {
        let path = self.path().display().to_string();
        self.device(kind, queues).map(|_| ()).unwrap_err().to_string().replace(&path, "PATH")
    }
}

/// A device and its driver, with the number of requests.
type Driver = guest::Guest<VhostUserDevice, u64>;

impl Driver {
    fn new(rig: &Rig, kind: VhostUserKind, queues: u16) -> Self {
        let device = rig.device(kind, queues.into()).unwrap();
        Self::stopped(device, 0, &rig.map, &vec![16; queues.into()])
    }

    /// A reset by the driver, with rings that start over.
    fn reset(&mut self, rig: &Rig) {
        self.device.reset();
        self.stop();
        for (index, ring) in self.queues.iter_mut().enumerate() {
            rig.map.write_slice(&[0; 1 << 16], GuestAddress((index as u64) << 16)).unwrap();
            *ring = DriverQueue::new(&rig.map, index as u16, 16);
        }
    }

    fn config(&self, len: usize) -> Vec<u8> {
        let mut config = vec![0xee; len];
        self.device.config_read(0, &mut config);
        config
    }

    /// Writes to the configuration as the function does, and waits for the threads that carry out the write.
    fn write_config(&mut self, offset: u64, data: &[u8]) -> usize {
        self.device.config_write(offset, data);
        self.device.config_written().into_iter().map(|thread| thread.join().unwrap()).count()
    }

    /// Makes a request in the second queue.
    fn request(&mut self) {
        self.host += 1;
        self.queues[1].send(BUFFERS + 4096 * self.host, &self.host.to_le_bytes(), &[]);
        self.kick(1);
    }

    /// Waits until the last request was carried out and the driver was notified.
    fn await_request(&mut self, rig: &Rig) {
        let mut sent = Vec::new();
        eventually("the request", || {
            sent.extend(receive(&rig.wire));
            sent.last().is_some_and(|request| *request == self.host.to_le_bytes())
        });
        eventually("its return", || !self.queues[1].take_used().is_empty());
        eventually("its interrupt", || self.interrupted(1));
    }

    fn await_lost(&self, losses: u64) {
        let heard = || logged(ID).iter().filter(|line| line.contains("is lost")).count() as u64;
        eventually("a loss", || heard() >= losses);
    }
}

#[test]
fn a_file_system_gets_its_config_locally_not_from_the_peer() {
    let rig = Rig::new();
    let peer = rig.peer(script(3, &[]));
    let mut driver = Driver::new(&rig, fs(), 3);
    let heard = peer.heard();
    assert!(heard.contains(&"SET_PROTOCOL_FEATURES 0x9900b".to_owned()), "{heard:?}");
    assert!(!heard.iter().any(|heard| heard.contains("CONFIG") || heard.contains("BACKEND")), "{heard:?}");
    let ring = [VIRTIO_F_VERSION_1, VIRTIO_F_IN_ORDER, VIRTIO_RING_F_INDIRECT_DESC, VIRTIO_RING_F_EVENT_IDX];
    assert_eq!(driver.device.features(), ring.iter().fold(0, |bits, bit| bits | 1 << bit));
    assert_eq!((driver.device.device_type(), driver.device.queue_sizes()), (26, &[16; 3][..]));
    let mut config = [0; 44];
    config[..10].copy_from_slice(b"kataShared");
    config[36] = 2;
    assert_eq!(driver.config(44), config);
    assert_eq!(driver.write_config(0, b"x"), 0);
    assert_eq!(driver.config(44), config);
    driver.start();
    let heard = peer.await_heard("STATUS 15");
    assert_eq!(heard.iter().filter(|heard| heard.starts_with("ENABLE")).count(), 3, "{heard:?}");
    assert!(heard[0].starts_with("SET_FEATURES") && heard.contains(&"ENABLE 2=1".to_owned()), "{heard:?}");
    driver.request();
    driver.await_request(&rig);
}

#[test]
fn a_peer_with_too_few_queues_or_without_version_1_is_refused() {
    let rig = Rig::new();
    let peer = rig.peer(script(2, &[]));
    let refused = "socket=PATH: the backend has fewer than 3 queues; give fewer queues, or start it with more";
    assert_eq!(rig.device_refusal(fs(), 3), refused);
    drop(peer);
    // A peer that cannot report its number of queues is trusted.
    let peer = rig.peer(script(2, &[]).without(&[PROTOCOL_F_MQ]));
    assert!(rig.device(fs(), 2).is_ok());
    drop(peer);
    let mut legacy = script(2, &[]);
    legacy.features &= !(1 << VIRTIO_F_VERSION_1);
    let _peer = rig.peer(legacy);
    assert!(rig.device_refusal(fs(), 2).contains("VIRTIO_F_VERSION_1"));
}

#[test]
fn requests_wait_for_a_peer_to_reconnect_and_are_repeated() {
    record_log();
    let rig = Rig::new();
    let no_record = script(2, &[]).without(&[PROTOCOL_F_INFLIGHT_SHMFD]);
    let peer = rig.peer(Script { keeps_buffers: true, ..no_record.clone() });
    let mut driver = Driver::new(&rig, fs(), 2);
    driver.start();
    driver.request();
    eventually("the request", || peer.kept() == 1);
    drop(peer);
    driver.await_lost(1);
    assert!(logged(ID).iter().any(|line| line.contains("its requests wait until it is back")));
    let _peer = rig.peer(no_record);
    driver.await_request(&rig);
    driver.request();
    driver.await_request(&rig);
}

/// A regression test for upstream's issues 6439, 6601 and 8765.
#[test]
fn a_peer_that_ends_in_a_reboot_is_awaited_by_the_next_driver() {
    let rig = Rig::new();
    let peer = rig.peer(script(2, &[]));
    let mut driver = Driver::new(&rig, fs(), 2);
    driver.start();
    driver.request();
    driver.await_request(&rig);
    drop(peer);
    let begun = Instant::now();
    driver.reset(&rig);
    assert!(begun.elapsed() < Duration::from_secs(5), "a reset does not wait");
    driver.start();
    driver.request();
    assert_eq!(driver.config(10), b"kataShared");
    // There is no peer for a while, and an unsuitable one comes in between.
    let unfit = rig.peer(Script { features: 1 << VIRTIO_F_VERSION_1, ..script(2, &[]) });
    eventually("the unfit peer", || unfit.connections() > 0);
    drop(unfit);
    let _peer = rig.peer(script(2, &[]));
    driver.await_request(&rig);
}

#[test]
fn a_restart_without_a_reset_continues_where_the_peer_stopped() {
    let rig = Rig::new();
    let peer = rig.peer(script(2, &[]));
    let mut driver = Driver::new(&rig, fs(), 2);
    for round in 0..3 {
        driver.start();
        assert!(peer.await_heard("STATUS 15").contains(&format!("BASE 1={round}")));
        driver.request();
        driver.await_request(&rig);
        driver.stop();
    }
    assert_eq!(peer.connections(), 1);
}

#[test]
fn a_disk_shows_the_peers_config_with_its_own_queue_count() {
    let rig = Rig::new();
    let _peer = rig.peer(script(2, &disk_config()));
    let driver = Driver::new(&rig, VhostUserKind::Disk, 2);
    let mut config = disk_config();
    config[NUM_QUEUES] = 2;
    assert_eq!(driver.config(60), config);
    assert_eq!(driver.device.device_type(), 2);
    let features = driver.device.features();
    assert!(has(features, VIRTIO_BLK_F_MQ) && has(features, VIRTIO_BLK_F_FLUSH));
    assert!(!has(features, VIRTIO_F_RING_PACKED) && !has(features, VIRTIO_BLK_F_ZONED));
    drop(driver);
    let single = Driver::new(&rig, VhostUserKind::Disk, 1);
    assert!(!has(single.device.features(), VIRTIO_BLK_F_MQ));
}

#[test]
fn a_peer_that_has_no_configuration_of_a_disk_is_refused() {
    let rig = Rig::new();
    let refused = "socket=PATH: the backend has no device configuration for this type of device;";
    for script in [script(1, &disk_config()).without(&[PROTOCOL_F_CONFIG]), script(1, &[0; 8])] {
        let _peer = rig.peer(script);
        assert!(rig.device_refusal(VhostUserKind::Disk, 1).starts_with(refused));
    }
}

#[test]
fn the_cache_mode_of_a_driver_is_sent_to_the_peer_and_successor() {
    let rig = Rig::new();
    let peer = rig.peer(script(2, &disk_config()));
    let mut driver = Driver::new(&rig, VhostUserKind::Disk, 2);
    driver.start();
    peer.await_heard("STATUS 15");
    driver.device.config_write(0, &[9]);
    driver.device.config_write(WRITEBACK as u64, &[0]);
    assert_eq!(driver.config(60)[WRITEBACK], 0, "it is read back at once");
    assert_eq!(peer.await_heard("GET_CONFIG"), ["SET_CONFIG 32=[0]", "GET_CONFIG"]);
    drop(peer);
    let peer = rig.peer(script(2, &disk_config()));
    let mut heard = Vec::new();
    eventually("the choice", || {
        heard.extend(peer.heard());
        heard.contains(&"SET_CONFIG 32=[0]".to_owned())
    });
    assert_eq!(driver.config(60)[WRITEBACK], 0);
    assert_eq!(driver.config(2), 1000u16.to_le_bytes());
}

#[test]
fn a_change_of_the_peers_configuration_interrupts_the_driver() {
    let rig = Rig::new();
    let peer = rig.peer(script(2, &disk_config()));
    let mut driver = Driver::new(&rig, VhostUserKind::Disk, 2);
    driver.start();
    peer.await_heard("STATUS 15");
    let generation = driver.device.config_generation();
    let mut larger = disk_config();
    larger[..2].copy_from_slice(&2000u16.to_le_bytes());
    peer.set_config(&larger);
    eventually("the interrupt", || driver.config_changed());
    assert_eq!(driver.config(2), 2000u16.to_le_bytes());
    assert_ne!(driver.device.config_generation(), generation);
    driver.request();
    driver.await_request(&rig);
}

#[test]
fn all_of_a_configuration_of_unknown_length_is_found() {
    let rig = Rig::new();
    for len in [0, 1, 8, 16, 100, 136, 255, 256] {
        let config: Vec<u8> = (0..len).map(|byte| byte as u8 | 1).collect();
        let _peer = rig.peer(script(2, &config));
        let driver = Driver::new(&rig, other(25), 2);
        assert_eq!(driver.config(300), [&config[..], &vec![0; 300 - len]].concat());
    }
}

#[test]
fn an_early_config_write_reaches_the_peer_before_it_completes() {
    let rig = Rig::new();
    let peer = rig.peer(script(2, &[5; 8]));
    let mut driver = Driver::new(&rig, other(18), 2);
    peer.heard();
    assert_eq!(driver.write_config(2, &[1, 2]), 1);
    assert_eq!(peer.heard(), ["SET_CONFIG 2=[1, 2]", "GET_CONFIG"]);
    assert_eq!(driver.config(8), [5, 5, 1, 2, 5, 5, 5, 5]);
    // Beyond the end there is nothing to write.
    assert_eq!(driver.write_config(7, &[1, 2]), 0);
    assert_eq!(driver.write_config(u64::MAX, &[1, 2]), 0);
    drop(peer);
    // With a lost peer the write neither fails nor waits for long; the next peer gets it.
    for _ in 0..100 {
        driver.write_config(0, &[3]);
    }
    let peer = rig.peer(script(2, &[5; 8]));
    driver.start();
    let mut heard = Vec::new();
    eventually("the write", || {
        heard.extend(peer.heard());
        heard.contains(&"SET_CONFIG 0=[3]".to_owned())
    });
}

/// A backend's configuration is compared like that of a device of this program.
#[test]
fn each_field_of_a_device_over_a_peer_does_as_its_rule_says() {
    let config: Vec<u8> = (1..=255).collect();
    for (kind, queues, config) in
        [(fs(), 2, &[][..]), (VhostUserKind::Disk, 2, &disk_config()), (other(18), 2, &config)]
    {
        let rig = Rig::new();
        let _peer = rig.peer(script(queues, config));
        crate::config_tables::tests::check(|| rig.device(kind.clone(), queues).unwrap());
    }
}
