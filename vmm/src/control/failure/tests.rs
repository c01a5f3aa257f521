//! HTTP status of each error.

use std::io;

use pci::TopologyError;
use virtio_devices::{
    BlockError, CharError, FunctionError, InterfaceNameError, Locking, NetError, NetSriovError, QueueError, RngError,
    TapError, VdpaError, VdpaFault, VhostNetError, VhostUserError, VhostUserRole,
};

use super::*;
use crate::api::SocketError;
use crate::config::Problem;
use crate::devices::{self, backends};
use crate::kvm;
use crate::pci_host::assign_bars::NoRoom;
use crate::serial::end::ConsoleError;
use crate::telemetry::monitor::MonitorError;
use crate::vcpu::cpu::VcpuError;
use crate::vm::memory::MemoryError;
use crate::vm::{VmError, boot};

const INVALID: u16 = 400;
const CONFLICT: u16 = 409;
const BUSY: u16 = 429;
const HOST: u16 = 500;

fn io() -> io::Error {
    io::ErrorKind::Other.into()
}

fn s() -> String {
    String::new()
}

#[track_caller]
fn check(expected: u16, errors: impl IntoIterator<Item = impl Into<Error>>) {
    for error in errors {
        let error = error.into();
        let text = format!("{error:?}");
        assert_eq!(Failure::from(error).kind.http_status(), expected, "{text}");
    }
}

#[track_caller]
fn check_vm(expected: u16, errors: impl IntoIterator<Item = impl Into<VmError>>) {
    check(expected, errors.into_iter().map(Into::into));
}

fn config(problem: Problem) -> Error {
    ConfigError { subject: s(), problem }.into()
}

fn backend(error: impl Into<backends::BackendError>) -> Error {
    VmError::from(devices::DeviceError::Backend { option: s(), error: error.into() }).into()
}

fn vdpa(fault: VdpaFault) -> Error {
    backend(backends::BackendError::Vdpa { key: "vdpa", error: VdpaError { path: "/d".into(), fault } })
}

#[test]
fn config_error_is_invalid_unless_in_use_or_of_the_host() {
    check(INVALID, [Problem::Syntax, Problem::Value, Problem::Missing, Problem::Conflict].map(|p| config(p(s()))));
    check(INVALID, [config(Problem::Limit(s())), config(Problem::NotYet { what: s(), remedy: s() })]);
    check(CONFLICT, [config(Problem::InUse { what: s(), user: s(), remedy: s() })]);
    check(HOST, [config(Problem::Host(s()))]);
}

#[test]
fn vm_error_is_of_the_host_unless_the_request_is_impossible() {
    check_vm(
        INVALID,
        [boot::BootError::NoKernel, boot::BootError::UnknownFormat("k".into()), boot::BootError::CmdlineNul],
    );
    check_vm(INVALID, [VmError::AddressBits { size: 1, bits: 36 }, VmError::PrivateMemory { option: s() }]);
    check_vm(BUSY, [VmError::VcpuLeaving { vcpu: 1 }]);
    check_vm(HOST, [MemoryError::Unaligned { key: "size", size: 1, page: 4096 }, MemoryError::Clear(io())]);
    check_vm(HOST, [kvm::KvmError::Absent, kvm::KvmError::Vcpus { key: "max", requested: 9, limit: 8 }]);
    check_vm(HOST, [VcpuError::Panicked(0), VcpuError::Signal(io())]);
    check_vm(
        HOST,
        [
            VmError::OpenFiles { needed: 2, limit: 1, has_vfs: true },
            VmError::Mappings { needed: 2, limit: 1, has_vfs: true },
            VmError::Threads { needed: 2, limit: 1, has_vfs: false, raise: "" },
            VmError::Host { action: "", error: io() },
        ],
    );
    check(HOST, [Error::Host { action: "", error: io() }]);
    check(HOST, [SocketError::InUse("p".into()), SocketError::Fd(3)]);
    check(HOST, [MonitorError::Fd(3)]);
    let taken = CharError::SocketInUse("s".into());
    check_vm(
        HOST,
        [
            ConsoleError::End { option: "--serial", error: taken },
            ConsoleError::Host { option: "--serial", error: io() },
        ],
    );
}

#[test]
fn device_error_is_invalid_unless_it_is_for_lack_of_room() {
    let place = |error| devices::DeviceError::Place { option: s(), error };
    let net = |error: NetError| devices::DeviceError::open(s(), error.kind(), error);
    let disk = |error: BlockError| devices::DeviceError::open(s(), error.kind(), error);
    let rng = |error: RngError| devices::DeviceError::open(s(), error.kind(), error);
    check_vm(INVALID, [NetError::Mac([1; 6]), NetError::Legacy(s())].map(net));
    check_vm(INVALID, [BlockError::Missing("d".into()), BlockError::NotWritable("d".into())].map(disk));
    check_vm(CONFLICT, [disk(BlockError::InUse("d".into()))]);
    check_vm(INVALID, [rng(RngError::NotADevice("r".into()))]);
    check_vm(CONFLICT, [TopologyError::NoSuchSlot(32), TopologyError::SlotTaken(1), TopologyError::NoSlot].map(place));
    check_vm(CONFLICT, [devices::DeviceError::NoRoom(NoRoom)]);
    let function = || FunctionError::Queue(QueueError::Count(0));
    check_vm(
        HOST,
        [
            devices::DeviceError::Function { option: s(), error: function() },
            devices::DeviceError::Sriov { option: s(), error: NetSriovError::Count { vfs: 1, reserved: 2 } },
            devices::DeviceError::Pages { option: s(), error: io() },
            devices::DeviceError::NoConsole,
            devices::DeviceError::NoChannel,
        ],
    );
}

#[test]
fn tap_error_is_of_the_host_unless_another_interface_is_named() {
    let (name, first, other, what) = (s(), s(), s(), "");
    check(CONFLICT, [TapError::InUse(s())].map(backend));
    check(
        INVALID,
        [
            TapError::Name { name: s(), error: InterfaceNameError::None },
            TapError::Queues { name: s(), queues: 0 },
            TapError::IsMultiQueue(s()),
            TapError::IsSingleQueue(s()),
            TapError::NotATapInterface(s()),
            TapError::NotATap { index: 0, source: io() },
            TapError::WrongFlags { name: s(), multi_queue: false },
            TapError::DifferentTaps { first, other },
        ]
        .map(backend),
    );
    let address = std::net::Ipv4Addr::LOCALHOST.into();
    check(
        HOST,
        [
            TapError::NoTunDevice,
            TapError::NoRightToTunDevice,
            TapError::TunDevice(io()),
            TapError::Socket(io()),
            TapError::NotOurs(s()),
            TapError::NoRightToCreate(s()),
            TapError::Gone(s()),
            TapError::Attach { name: s(), source: io() },
            TapError::Configure { name: s(), what, source: io() },
            TapError::Mask { ip: address, mask: address },
            TapError::Request { name, source: io() },
        ]
        .map(backend),
    );
}

#[test]
fn backend_in_use_is_a_conflict_and_missing_rights_host_errors() {
    check(CONFLICT, [VhostUserError::InUse(s()), VhostUserError::Busy(s())].map(backend));
    check(
        HOST,
        [
            VhostUserError::NoRight(s()),
            VhostUserError::NoRightToListen(s()),
            VhostUserError::Socket { path: s(), source: io() },
            VhostUserError::Peer { path: s(), request: s(), reason: s() },
        ]
        .map(backend),
    );
    check(
        INVALID,
        [
            VhostUserError::Missing(s()),
            VhostUserError::NotASocket(s()),
            VhostUserError::Occupied(s()),
            VhostUserError::Refused(s()),
            VhostUserError::NoFolder(s()),
            VhostUserError::NobodyCame { path: s() },
            VhostUserError::Legacy(s()),
            VhostUserError::TooFewQueues { path: s(), role: VhostUserRole::Nic { queue_pairs: 2 } },
            VhostUserError::NoConfig(s()),
            VhostUserError::NotShared(s()),
            VhostUserError::TooManyRegions { path: s(), regions: 9, most: 8 },
        ]
        .map(backend),
    );
    check(INVALID, [backend(backends::BackendError::Fd(3))]);
    let kernel = [VhostNetError::Missing, VhostNetError::NoRight, VhostNetError::Device(io()), VhostNetError::Legacy];
    check(HOST, kernel.map(backend));
}

#[test]
fn vdpa_error_is_invalid_unless_in_use_or_failing() {
    let (wanted, has, mac) = (1, 2, [0; 6]);
    check(CONFLICT, [vdpa(VdpaFault::InUse)]);
    check(
        HOST,
        [
            VdpaFault::NoRight,
            VdpaFault::Silent,
            VdpaFault::MemoryLock(Locking { needed: 1, limit: None }),
            VdpaFault::Map(io()),
            VdpaFault::Changed,
            VdpaFault::Request { what: "", source: io() },
        ]
        .map(vdpa),
    );
    check(
        INVALID,
        [
            VdpaFault::Missing,
            VdpaFault::NoIommu,
            VdpaFault::NotVdpa,
            VdpaFault::NotNet(2),
            VdpaFault::Feature(""),
            VdpaFault::Queues { wanted, has },
            VdpaFault::ControlQueue { wanted, has },
            VdpaFault::QueueCount { count: 1, pairs: 1, needed: 2 },
            VdpaFault::NotShared,
            VdpaFault::IovaRange { device: 0..=1, guest: 0..=2 },
            VdpaFault::Mac { wanted: mac, has: mac },
        ]
        .map(vdpa),
    );
}
