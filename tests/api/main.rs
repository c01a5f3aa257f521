//! Tests of the REST API with the real command and its clients' requests. Guests consist of a few instructions and run
//! on the machine's own KVM.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod announced;
mod as_firmware;
#[path = "../../vmm/src/migration/tls/testing.rs"]
mod certificates;
mod client;
mod clients;
mod code;
mod confined;
mod disks;
mod driven;
mod drop_in;
#[path = "../../xtask/src/error.rs"]
#[expect(dead_code, reason = "what makes disks only passes errors on")]
mod error;
mod fat32;
mod faults;
#[path = "../cli/files.rs"]
#[expect(dead_code, reason = "these tests use only one of the kernels")]
mod files;
mod floods;
#[path = "../../xtask/src/lab/gpt.rs"]
mod gpt;
mod guides;
mod hyperv;
mod hypervisor_fw;
mod landlock;
mod legacy;
mod limits;
mod lost;
mod memory;
mod migration;
mod migration_answers;
mod migration_backends;
mod migration_chaos;
mod migration_endurance;
mod migration_events;
mod migration_fds;
mod migration_guest;
mod migration_hostile;
mod migration_late;
mod migration_local;
mod migration_pages;
mod migration_peer;
mod migration_storage;
mod migration_strangers;
mod migration_tls;
mod migration_waits;
#[path = "../integration/src/migration_wire.rs"]
#[expect(unreachable_pub, reason = "it is a part of the harness of guests in the lab, too")]
mod migration_wire;
mod missing;
mod mute_peer;
mod nics;
mod on_off;
mod pmem;
mod policy;
mod privileges;
mod readme;
mod refused;
mod registry_client;
mod rootless;
mod snapshot;
mod switch;
mod tap;
mod templates;
#[path = "../../vmm/tests/common/mod.rs"]
mod tiny;
mod tpm;
mod unlogged;
mod virtio_mem;
mod vmm;
mod vsock;
