//! Each field of each device, changed between a save and a restore.

use std::fs::File;
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::sync::Arc;

use pci::Rid;

use crate::device::config::{ConfigField, Rule, length};
use crate::memory_devices::{balloon, mem, pmem};
use crate::testing::driver_queue::{MEMORY, memory};
use crate::testing::{Driver, Hosted, nic};
use crate::transport::features::has;
use crate::*;

const RID: Rid = Rid::from_bits(3 << 3);

type Function<D> = Hosted<VirtioFunction<D>>;

fn function<D: VirtioDevice>(device: D) -> Function<D> {
    Hosted::new(VirtioFunction::plain(device, RID, memory()).unwrap())
}

/// The state of a function whose driver has accepted all features and read the configuration.
fn saved<D: VirtioDevice>(device: D) -> (DeviceState, Function<D>) {
    let mut function = function(device);
    Driver::new(&mut function, RID).negotiate();
    function.pause();
    (function.save().unwrap().unwrap(), function)
}

/// The device configuration as a driver reads it, and its generation.
fn read<D: VirtioDevice>(function: &mut Function<D>, len: usize) -> (Vec<u8>, u8) {
    let mut driver = Driver::new(function, RID);
    let config = (0..len as u64).map(|at| driver.bar_read(2, 0x200 + at, 1) as u8).collect();
    (config, driver.common_read(0x15, 1) as u8)
}

/// Other values of a field.
fn others(value: &[u8]) -> Vec<Vec<u8>> {
    let mut others: Vec<Vec<u8>> = vec![vec![0; value.len()], vec![0xff; value.len()]];
    for at in 0..value.len() {
        for change in [1u8, 0xff, 0x80] {
            let mut other = value.to_vec();
            other[at] = other[at].wrapping_add(change);
            others.push(other);
        }
    }
    others.retain(|other| other != value);
    others
}

fn as_number(value: &[u8]) -> u128 {
    value.iter().rev().fold(0, |number, byte| number << 8 | u128::from(*byte))
}

/// Checks that the device's fields cover its whole configuration, and that a driver that read another value of any
/// field is handled by the field's rule.
pub(crate) fn check<D: VirtioDevice>(make: impl Fn() -> D) {
    let device = make();
    let (fields, features) = (device.config_fields(), device.features());
    let len = length(fields);
    let (state, mut before) = saved(device);
    let (all, generation) = read(&mut before, 0x400);
    drop(before);
    assert!(all[len..].iter().all(|byte| *byte == 0), "a byte beyond {len} is in no field: {all:?}");
    let tiled = fields.iter().scan(0, |end, field| {
        let start = std::mem::replace(end, field.offset + field.len);
        Some(start == field.offset && field.len > 0)
    });
    assert!(tiled.into_iter().all(|fits| fits), "fields have gaps: {fields:?}");
    let told = state.function.told.clone().unwrap();
    assert_eq!((&told.config.0[..], told.generation), (&all[..len], generation));
    let restored = |state: &DeviceState| {
        let mut function = function(make());
        function.restore(state).map(|()| function)
    };
    assert_eq!(restored(&state).unwrap().save().unwrap().unwrap(), state);
    for field in fields {
        let now = field.value(&all).unwrap();
        for then in others(now) {
            let mut state = state.clone();
            let at = usize::from(field.offset);
            state.function.told.as_mut().unwrap().config.0[at..at + then.len()].copy_from_slice(&then);
            let case = format!("{}: {then:?} then, {now:?} now", field.name);
            let result = restored(&state);
            let grows = as_number(&then) < as_number(now);
            let offered = field.feature.is_none_or(|bit| has(features, bit));
            let (is_taken, is_announced) = match field.rule {
                _ if !offered => (true, false),
                Rule::Announced => (true, true),
                Rule::Grows => (grows, grows),
                Rule::Served => (result.is_ok(), false),
                Rule::Same | Rule::Saved => (false, false),
            };
            match result {
                Ok(mut function) => {
                    assert!(is_taken, "taken: {case}");
                    let (config, after) = read(&mut function, len);
                    let expected = if field.rule == Rule::Served && offered { &then[..] } else { now };
                    assert_eq!(field.value(&config).unwrap(), expected, "{case}");
                    let announced = Driver::new(&mut function, RID).bar_read(2, 0x100, 1) & 2 != 0;
                    assert_eq!((announced, after != generation), (is_announced, is_announced), "{case}");
                }
                Err(StateError::Told { what, .. }) => {
                    assert!(!is_taken, "refused: {case}");
                    let named = fields.iter().find(|named| named.name == what).unwrap();
                    // A served field may change fields that depend on it.
                    assert!(what == field.name || named.rule == Rule::Served, "{case}: {what}");
                }
                Err(error) => panic!("{case}: {error}"),
            }
        }
    }
    without_a_driver(&state, make);
}

/// The next driver reads everything: nothing is refused.
fn without_a_driver<D: VirtioDevice>(state: &DeviceState, make: impl Fn() -> D) {
    let mut idle = {
        let mut idle = function(make());
        idle.pause();
        idle.save().unwrap().unwrap()
    };
    let mut told = state.function.told.clone().unwrap();
    told.config.0.iter_mut().for_each(|byte| *byte ^= 0xff);
    idle.function.told = Some(told);
    function(make()).restore(&idle).unwrap();
    // Fields that were not saved are not compared, either.
    let mut state = state.clone();
    state.function.told = None;
    function(make()).restore(&state).unwrap();
}

fn net(mtu: Option<u16>) -> Net {
    let sockets = [0; 2].map(|_| UnixDatagram::pair().unwrap().0.into());
    let spec = NetSpec { mtu, ..net::testing::spec(2, 256) };
    nic(spec, sockets.into()).unwrap()
}

fn image(len: u64) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(len).unwrap();
    file
}

fn disk(file: &tempfile::NamedTempFile) -> Block {
    // A child of another test may still hold the previous disk's lock.
    let spec = BlockSpec { path: file.path().into(), queues: 2, ..block::testing::spec(false) };
    let _spawning = block::testing::SPAWNING.lock();
    Block::open(spec).unwrap()
}

#[test]
fn each_field_of_a_nic_does_as_its_rule_says() {
    check(|| net(None));
    check(|| net(Some(1400)));
}

#[test]
fn each_field_of_a_disk_does_as_its_rule_says() {
    let file = image(8 << 20);
    check(|| disk(&file));
}

#[test]
fn each_field_of_a_console_does_as_its_rule_says() {
    let window = || Arc::new(ConsoleWindow::new(ConsoleSize { columns: 80, rows: 25 }));
    let end = || Arc::new(CharDevice::open(&CharSpec::Null).unwrap());
    check(|| Console::new("_console", end(), Some(window())));
    check(|| Console::new("_console", end(), None));
    let channel = || Arc::new(ChannelEnd::new().unwrap());
    check(|| GuestChannel::new("__channel", channel(), ["a", "b"]));
}

#[test]
fn each_field_of_a_balloon_does_as_its_rule_says() {
    let spec = || BalloonSpec { id: "_balloon".into(), size: 8 << 20, deflate_on_oom: true, free_page_reporting: true };
    check(|| Balloon::new(spec(), Arc::default()));
}

#[test]
fn each_field_of_a_memory_device_does_as_its_rule_says() {
    for node in [None, Some(3)] {
        check(|| {
            let region = Arc::new(MemRegion::new(&(MEMORY..MEMORY + (1 << 20)), 64 << 10, 1));
            region.resize(128 << 10);
            Mem::new(MemSpec { id: "_mem0".into(), node }, region)
        });
    }
}

#[test]
fn each_field_of_an_iommu_does_as_its_rule_says() {
    check(|| IommuDevice::new("_iommu", Iommu::new(48)));
}

#[test]
fn each_field_of_persistent_memory_does_as_its_rule_says() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("pmem");
    File::create(&file).unwrap().set_len(PmemSpec::UNIT).unwrap();
    let spec = |discard_writes| PmemSpec { id: "_pmem0".into(), file: file.clone(), size: None, discard_writes };
    check(|| Pmem::open(spec(false)).unwrap());
    // The driver relies on its writes being kept, or the file on their not being kept.
    for (then, now) in [(true, false), (false, true)] {
        let (state, _) = saved(Pmem::open(spec(then)).unwrap());
        let said = function(Pmem::open(spec(now)).unwrap()).restore(&state).unwrap_err().to_string();
        let word = |is| if is { "on" } else { "off" };
        let expected =
            format!("its driver has read discard_writes {}, but the device here has {}; ", word(then), word(now));
        assert!(said.starts_with(&expected), "{said}");
    }
}

#[test]
fn each_field_of_a_vsock_does_as_its_rule_says() {
    let folder = tempfile::tempdir().unwrap();
    let next = std::cell::Cell::new(0);
    check(|| {
        next.set(next.get() + 1);
        let socket = folder.path().join(format!("socket{}", next.get()));
        Vsock::open(VsockSpec { id: "_vsock".into(), cid: 3, socket }).unwrap()
    });
}

#[test]
fn devices_without_fields_have_no_device_configuration() {
    let source = || RngSpec { id: "_rng".into(), source: "/dev/urandom".into() };
    let (state, mut function) = saved(Rng::open(source()).unwrap());
    assert_eq!(state.function.told, None);
    assert_eq!(read(&mut function, 0x400).0, [0; 0x400]);
}

#[test]
fn a_smaller_disk_is_refused_and_a_larger_one_is_reported() {
    let file = image(8 << 20);
    let (state, gone) = saved(disk(&file));
    drop(gone);
    file.as_file().set_len(4 << 20).unwrap();
    let said = function(disk(&file)).restore(&state).unwrap_err().to_string();
    assert_eq!(
        said,
        "its driver has read capacity (sectors of 512 bytes) 16384, but the device here has 8192; configure it as it \
         was"
    );
    file.as_file().set_len(16 << 20).unwrap();
    let mut larger = function(disk(&file));
    larger.restore(&state).unwrap();
    assert_eq!(Driver::new(&mut larger, RID).bar_read(2, 0x200, 4), 32_768);
    assert_eq!(Driver::new(&mut larger, RID).bar_read(2, 0x100, 1), 2, "a configuration change interrupt");
}

#[test]
fn a_disk_keeps_the_block_sizes_that_its_driver_has_read() {
    let file = image(8 << 20);
    let (mut state, gone) = saved(disk(&file));
    drop(gone);
    // Blocks of 4 KiB, with physical blocks of the same size.
    let config = &mut state.function.told.as_mut().unwrap().config.0;
    for (at, value) in [(20, 4096u32), (44, 8)] {
        config[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    (config[24], config[26]) = (0, 1);
    let mut disk = function(disk(&file));
    disk.restore(&state).unwrap();
    assert_eq!(Driver::new(&mut disk, RID).bar_read(2, 0x214, 4), 4096);
    // Also after a reset: they are part of the disk's contents.
    Driver::new(&mut disk, RID).negotiate();
    assert_eq!(Driver::new(&mut disk, RID).bar_read(2, 0x214, 4), 4096);
}

#[test]
fn a_disk_that_became_readonly_or_has_a_new_serial_is_refused() {
    let file = image(8 << 20);
    let (state, gone) = saved(disk(&file));
    drop(gone);
    let spec = || BlockSpec { path: file.path().into(), queues: 2, ..block::testing::spec(false) };
    let refusal = |spec: BlockSpec| {
        let _spawning = block::testing::SPAWNING.lock();
        function(Block::open(spec).unwrap()).restore(&state).unwrap_err().to_string()
    };
    let said = refusal(BlockSpec { serial: Some("x".into()), ..spec() });
    assert!(said.starts_with("its driver has read serial serial-1, but the device here has x"), "{said}");
    // It also lacks features: those for changing it.
    let said = refusal(BlockSpec { read_only: true, ..spec() });
    assert!(said.starts_with("its driver uses the virtio feature bits 1"), "{said}");
}

/// Every kind of device that has a device configuration, and the fields of that.
const TABLES: [(&str, &[ConfigField]); 11] = [
    ("NIC, PF, VF", net::FIELDS),
    ("disk, also over vhost-user", block::FIELDS),
    ("console", console::FIELDS),
    ("guest channel", guest_channel::FIELDS),
    ("balloon", balloon::FIELDS),
    ("memory", mem::FIELDS),
    ("IOMMU", iommu::FIELDS),
    ("vsock", vsock::FIELDS),
    ("persistent memory", pmem::FIELDS),
    ("file system over vhost-user", vhost_user_device::FILE_SYSTEM),
    ("another device over vhost-user", vhost_user_device::OTHER),
];

/// The rows of the table in the documentation.
fn rows() -> String {
    let fields = TABLES.iter().flat_map(|(device, fields)| fields.iter().map(move |field| (device, field)));
    let rows = fields.map(|(device, field)| {
        let last = field.offset + field.len - 1;
        format!("| {device} | {}-{last} | {} | {} |\n", field.offset, field.name, field.rule.name())
    });
    rows.collect()
}

#[test]
fn the_documentation_has_a_row_for_each_field() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = std::fs::read_to_string(workspace.join("docs/migration.md")).unwrap();
    let begin = "| device | bytes | field | rule |\n|---|---|---|---|\n";
    let (_, table) = text.split_once(begin).expect("the table of fields");
    let end = table.find("\n\n").map_or(table.len(), |end| end + 1);
    assert!(table[..end] == rows(), "docs/migration.md: the table of fields has to be:\n{begin}{}", rows());
}
