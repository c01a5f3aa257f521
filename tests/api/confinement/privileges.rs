//! Privileges, memory and descriptors that the running program keeps.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::json;

use crate::net::tap::Kept;
use crate::rig::vmm::Vmm;

/// A status line of the program's threads, without duplicates: `proc_pid_status(5)`.
fn of_threads(vmm: &Vmm, name: &str) -> BTreeSet<String> {
    let threads = fs::read_dir(format!("/proc/{}/task", vmm.pid())).unwrap();
    let status = threads.map(|thread| fs::read_to_string(thread.unwrap().path().join("status")).unwrap_or_default());
    let line = |text: String| text.lines().find_map(|line| line.strip_prefix(name)).map(|line| line.trim().to_string());
    status.filter_map(line).collect()
}

#[test]
fn no_thread_has_rights_that_no_vm_needs_or_can_get_more() {
    let vmm = Vmm::start();
    // CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_NET_ADMIN, CAP_IPC_LOCK, CAP_SYS_RESOURCE.
    let kept: u64 = [1, 2, 3, 12, 14, 24].iter().map(|capability| 1 << capability).sum();
    let _client = vmm.boot(json!([{"id": "n", "tap": "apipriv0"}]));
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        for found in of_threads(&vmm, set) {
            let found = u64::from_str_radix(&found, 16).unwrap();
            assert_eq!(found & !kept, 0, "{set} {found:x}: this test needs root");
        }
    }
    assert_eq!(of_threads(&vmm, "NoNewPrivs:"), BTreeSet::from(["1".to_string()]));
}

#[test]
fn core_dumps_do_not_have_the_guests_memory() {
    for (dump, dumped) in [(json!(null), false), (json!(true), true)] {
        let vmm = Vmm::start();
        let mut config = vmm.config(json!([]));
        config["memory"]["dump"] = dump;
        config["memory"]["shared"] = json!(true);
        config["pmem"] = json!([{"file": vmm.files.sparse("pmem", 2 << 20), "discard_writes": true}]);
        let _client = vmm.boot_config(&config);
        let smaps = fs::read_to_string(format!("/proc/{}/smaps", vmm.pid())).unwrap();
        let flags = |name: &str| {
            let mut lines = smaps.lines().skip_while(|line| !line.contains(name));
            lines.find_map(|line| line.strip_prefix("VmFlags:")).unwrap_or_else(|| panic!("{name}: {smaps}"))
        };
        assert_eq!(flags("memfd:guest-memory").contains(" dd"), !dumped, "{}", flags("memfd:guest-memory"));
        assert!(flags("/pmem").contains(" dd"), "{}", flags("/pmem"));
    }
}

/// The descriptors of a process that execve does not close, with their targets: `proc_pid_fdinfo(5)`.
fn stays_open(pid: &str) -> Vec<(u32, String)> {
    let numbers = fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap();
    let numbers = numbers.map(|entry| entry.unwrap().file_name().into_string().unwrap().parse::<u32>().unwrap());
    let is_one = |number: &u32| {
        // A descriptor may have been closed in the meantime.
        let Ok(info) = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")) else { return false };
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
        // O_CLOEXEC.
        u32::from_str_radix(flags, 8).unwrap() & 0o2_000_000 == 0
    };
    let target = |number| fs::read_link(format!("/proc/{pid}/fd/{number}")).unwrap_or_default().display().to_string();
    // Input and output are the parent's.
    numbers.filter(|number| *number > 2).filter(is_one).map(|number| (number, target(number))).collect()
}

#[test]
fn child_programs_get_no_descriptors_and_other_users_no_files() {
    // Both inherit the descriptors that the test's own parent left open, and those that another test has open at that
    // moment.
    let mut inherited: Vec<_> = stays_open("self").into_iter().map(|(number, _)| number).collect();
    let vmm = Vmm::start();
    let _tap = Kept::of_many_queues("apicx0");
    let mut config = vmm.config(json!([
        {"id": "a", "tap": "apicx0", "num_queues": 4},
        {"id": "b", "tap": "apicxb", "sriov_vfs": 2},
        {"id": "c", "tap": "apicxc", "vhost": "auto"},
    ]));
    config["memory"]["shared"] = json!(true);
    config["disks"] = json!([
        {"path": vmm.files.sparse("disk", 1 << 20)},
        {"path": vmm.files.sparse("second", 1 << 20), "disable_io_uring": true, "readonly": true},
    ]);
    config["pmem"] = json!([{"file": vmm.files.sparse("pmem", 2 << 20)}]);
    config["serial"] = json!({"mode": "File", "file": vmm.files.path("serial")});
    config["console"] = json!({"mode": "Socket", "socket": vmm.files.path("console")});
    config["debug_console"] = json!({"mode": "Pty"});
    config["vsock"] = json!({"cid": 3, "socket": vmm.files.path("vsock")});
    config["balloon"] = json!({"size": 0});
    config["rtc"] = json!({});
    config["watchdog"] = json!(true);
    config["pvpanic"] = json!(true);
    let mut client = vmm.boot_config(&config);
    client.put_json("vm.add-disk", &json!({"id": "later", "path": vmm.files.sparse("later", 1 << 20)})).expect(200);
    client.put("vm.reboot").expect(204);
    inherited.extend(stays_open("self").into_iter().map(|(number, _)| number));
    let pid = vmm.pid().to_string();
    let left: Vec<_> = stays_open(&pid).into_iter().filter(|(number, _)| !inherited.contains(number)).collect();
    assert!(left.is_empty(), "{left:?} are not closed by execve");
    assert!(vmm.open_files() > 40 + inherited.len(), "{}", vmm.open_files());
    for name in ["serial", "console", "vsock", "socket", "socket.lock"] {
        let mode = fs::metadata(vmm.files.path(name)).unwrap().mode();
        assert_eq!(mode & 0o077, 0, "{name}: {mode:o}");
    }
}
