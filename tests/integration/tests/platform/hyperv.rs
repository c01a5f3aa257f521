//! Guests with Hyper-V's hypervisor interface (`--cpus kvm_hyperv=on`), as used by Windows.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking, also in its helpers")]

#[path = "../../../api/rig/code.rs"]
#[expect(dead_code, reason = "other tests drive devices")]
mod code;
#[path = "../../../cli/files.rs"]
#[expect(dead_code, reason = "the tests of the command line use the rest")]
mod files;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use code::Code;
use integration::{
    Api, Backend, Bridge, Guest, HostTap, Kernel, Pf, Plan, Stream, Subnet, Vf, VmmCommand, spec_with_vfs, vf_taps,
};
use rstest::rstest;
use serde_json::{Value, json};

/// The address of the tiny guest's report.
const REPORT: u32 = 0x30_0000;
/// The tiny guest's pages for KVM: hypercalls, the reference time, messages, events.
const HYPERCALLS: u32 = 0x31_0000;
const TIME_PAGE: u32 = 0x32_0000;
const MESSAGES: u32 = 0x33_0000;
const EVENTS: u32 = 0x34_0000;
/// The interrupt source of its timer, its vector, and the place of its messages.
const SOURCE: u32 = 2;
const VECTOR: u32 = 0x50;
const MESSAGE: u32 = MESSAGES + 256 * SOURCE;
/// The duration of a turn of the tiny guest, in units of 100 ns.
const TURN: u32 = 200_000;

// Registers of the interface (Microsoft's Hypervisor Top Level Functional Specification, appendix C).
const GUEST_OS_ID: u32 = 0x4000_0000;
const HYPERCALL: u32 = 0x4000_0001;
const TIME_REF_COUNT: u32 = 0x4000_0020;
const REFERENCE_TSC: u32 = 0x4000_0021;
const SCONTROL: u32 = 0x4000_0080;
const SIEFP: u32 = 0x4000_0082;
const SIMP: u32 = 0x4000_0083;
const EOM: u32 = 0x4000_0084;
const SINT2: u32 = 0x4000_0092;
const STIMER0_CONFIG: u32 = 0x4000_00b0;
const STIMER0_COUNT: u32 = 0x4000_00b1;
/// The identity of an open source operating system.
const IDENTITY: u32 = 0x8100_0000;
/// The type of a timer's message.
const TIMER_EXPIRED: u32 = 0x8000_0010;
/// The result of a hypercall without the privilege for it.
const ACCESS_DENIED: u32 = 6;

/// Lengths of the tiny guest's first report, and of the report of each turn, in bytes.
const FIRST: usize = 11 * 16 + 8;
const LATER: usize = 68;
/// The time limit for a report of the tiny guest.
const PATIENCE: Duration = Duration::from_secs(120);

/// More instructions of a guest in flat 32-bit mode.
trait Instructions {
    /// `mov eax, low; mov edx, high; mov ecx, index; wrmsr`
    fn set_msr(self, index: u32, high: u32, low: u32) -> Self;
    /// `mov ecx, index; rdmsr`
    fn msr(self, index: u32) -> Self;
    /// `stosd; mov eax, edx; stosd`
    fn report_pair(self) -> Self;
    /// `mov eax, [address]; stosd`
    fn report(self, address: u32) -> Self;
    /// Writes the report to the serial port.
    fn send(self) -> Self;
}

impl Instructions for Code {
    fn set_msr(self, index: u32, high: u32, low: u32) -> Self {
        let [index, high, low] = [index, high, low].map(u32::to_le_bytes);
        self.bytes(&[&[0xb8], &low, &[0xba], &high, &[0xb9], &index, &[0x0f, 0x30]])
    }

    fn msr(self, index: u32) -> Self {
        self.bytes(&[&[0xb9], &index.to_le_bytes(), &[0x0f, 0x32]])
    }

    fn report_pair(self) -> Self {
        self.bytes(&[&[0xab, 0x89, 0xd0, 0xab]])
    }

    fn report(self, address: u32) -> Self {
        self.bytes(&[&[0xa1], &address.to_le_bytes(), &[0xab]])
    }

    fn send(self) -> Self {
        // mov esi, REPORT; mov ecx, edi; sub ecx, esi; mov dx, 0x3f8; rep outsb
        let code = self.bytes(&[&[0xbe], &REPORT.to_le_bytes()]);
        code.bytes(&[&[0x89, 0xf9, 0x29, 0xf1, 0x66, 0xba, 0xf8, 0x03, 0xf3, 0x6e]])
    }
}

/// A guest that reports the leaves of CPUID and the result of a hypercall. Then, each time a timer of the interface has
/// sent it a message, it reports the time, the message, the page of the reference time, the time stamp counter, the
/// time again, and the pending interrupt.
fn tiny() -> Vec<u8> {
    // cli; cld; mov esp, 0x3f0000; mov edi, REPORT
    let start = Code::default().bytes(&[&[0xfa, 0xfc, 0xbc, 0, 0, 0x3f, 0, 0xbf], &REPORT.to_le_bytes()]);
    let leaves = (0x4000_0000_u32..=0x4000_000a).fold(start, |code, leaf| {
        // mov eax, leaf; cpuid; stosd; mov eax, ebx; stosd; mov eax, ecx; stosd; mov eax, edx; stosd
        let code = code.bytes(&[&[0xb8], &leaf.to_le_bytes(), &[0x0f, 0xa2, 0xab, 0x89, 0xd8, 0xab]]);
        code.bytes(&[&[0x89, 0xc8, 0xab, 0x89, 0xd0, 0xab]])
    });
    let set_up = leaves
        // Enables the local APIC.
        .dword(0xfee0_00f0, 0x1ff)
        .set_msr(GUEST_OS_ID, IDENTITY, 1)
        .set_msr(HYPERCALL, 0, HYPERCALLS | 1)
        .set_msr(REFERENCE_TSC, 0, TIME_PAGE | 1)
        .set_msr(SIEFP, 0, EVENTS | 1)
        .set_msr(SIMP, 0, MESSAGES | 1)
        .set_msr(SINT2, 0, VECTOR)
        .set_msr(SCONTROL, 0, 1);
    // HvCallPostMessage: push edi; xor edx, edx; mov eax, 0x5c; xor ebx, ebx; mov ecx, EVENTS; xor edi, edi;
    // xor esi, esi
    let called = set_up.bytes(&[&[0x57, 0x31, 0xd2, 0xb8, 0x5c, 0, 0, 0, 0x31, 0xdb, 0xb9], &EVENTS.to_le_bytes()]);
    // mov ebp, HYPERCALLS; call ebp; pop edi
    let called = called.bytes(&[&[0x31, 0xff, 0x31, 0xf6, 0xbd], &HYPERCALLS.to_le_bytes(), &[0xff, 0xd5, 0x5f]]);
    let told = called.report_pair().send();
    let top = told.0.len();
    let begun = told.bytes(&[&[0xbf], &REPORT.to_le_bytes()]).msr(TIME_REF_COUNT).report_pair().msr(TIME_REF_COUNT);
    // add eax, TURN; adc edx, 0; mov ecx, STIMER0_COUNT; wrmsr
    let armed = begun.bytes(&[&[0x05], &TURN.to_le_bytes(), &[0x83, 0xd2, 0, 0xb9]]);
    let armed =
        armed.bytes(&[&STIMER0_COUNT.to_le_bytes(), &[0x0f, 0x30]]).set_msr(STIMER0_CONFIG, 0, SOURCE << 16 | 1);
    // wait: cmp dword [MESSAGE], 0; pause; je wait
    let waited = armed.bytes(&[&[0x83, 0x3d], &MESSAGE.to_le_bytes(), &[0, 0xf3, 0x90, 0x74, 0xf5]]);
    let parts = [0, 0x18, 0x1c, 0x20, 0x24].map(|at| MESSAGE + at);
    let reported = parts.into_iter().fold(waited, Instructions::report);
    let parts = [0, 8, 12, 16, 20].map(|at| TIME_PAGE + at);
    let reported = parts.into_iter().fold(reported, Instructions::report);
    // rdtsc
    let reported = reported.bytes(&[&[0x0f, 0x31]]).report_pair().msr(TIME_REF_COUNT).report_pair();
    let reported = reported.report(0xfee0_0200 + 0x10 * (VECTOR / 32));
    let ended = reported.dword(MESSAGE, 0).set_msr(EOM, 0, 0).send();
    let back = i32::try_from(top).unwrap() - i32::try_from(ended.0.len() + 5).unwrap();
    ended.bytes(&[&[0xe9], &back.to_le_bytes()]).0
}

/// A report of the tiny guest: numbers of 4 and 8 bytes.
struct Report<'a>(&'a [u8]);

impl Report<'_> {
    fn dword(&mut self) -> u32 {
        let (first, rest) = self.0.split_first_chunk().unwrap();
        self.0 = rest;
        u32::from_le_bytes(*first)
    }

    fn qword(&mut self) -> u64 {
        u64::from(self.dword()) | u64::from(self.dword()) << 32
    }
}

/// Checks the report of a turn that started at `after` or later. Returns the time at its end.
fn check_turn(report: &[u8], after: u64) -> u64 {
    let mut report = Report(report);
    let start = report.qword();
    assert!(start >= after, "time went back from {after} to {start}");
    assert_eq!(report.dword(), TIMER_EXPIRED);
    let (expiration, delivery) = (report.qword(), report.qword());
    assert!(expiration >= start + u64::from(TURN) && delivery >= expiration, "{start} {expiration} {delivery}");
    let (sequence, scale, offset, counter) = (report.dword(), report.qword(), report.qword(), report.qword());
    let end = report.qword();
    assert!(end >= delivery, "time went back from {delivery} to {end}");
    // A sequence of 0 means that the host's clock is not its time stamp counter, so the page has no time.
    if sequence != 0 {
        let time = u64::try_from((u128::from(counter) * u128::from(scale)) >> 64).unwrap().wrapping_add(offset);
        // The register was read after the counter, some exits later.
        assert!(time <= end + 1000 && end < time + 600_000_000, "{time} by the page, {end} by the register");
    }
    assert_ne!(report.dword() & 1 << (VECTOR % 32), 0, "the interrupt waits");
    println!("from {start} to {end}, page {sequence}");
    end
}

/// Waits until the file has `len` bytes, and reads it.
fn reports(file: &Path, len: usize) -> Vec<u8> {
    let until = Instant::now() + PATIENCE;
    loop {
        let bytes = fs::read(file).unwrap_or_default();
        if bytes.len() >= len {
            return bytes;
        }
        assert!(Instant::now() < until, "{} bytes of {len}", bytes.len());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Saves the paused VM in a new folder. Returns the machine's state.
fn save(api: &Api, folder: &Path) -> Value {
    fs::create_dir(folder).unwrap();
    let answer = api.put_json("vm.snapshot", &json!({"destination_url": format!("file://{}", folder.display())}));
    assert_eq!(answer.status, 204, "{}", answer.body);
    let state: Value = serde_json::from_slice(&fs::read(folder.join("state.json")).unwrap()).unwrap();
    state["state"]["machine"].clone()
}

fn start(name: &str) -> (Api, integration::Vmm) {
    let api = Api::new(name);
    let vmm = VmmCommand::new().args(["--api-socket", &api.argument()]).spawn();
    (api, vmm)
}

/// Redirects the serial port in a snapshot's configuration to another file.
fn redirect(folder: &Path, to: &Path) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(config["cpus"]["kvm_hyperv"], true);
    config["serial"]["file"] = json!(to);
    fs::write(path, config.to_string()).unwrap();
}

/// Checks the leaves of CPUID and the result of a hypercall.
fn check_first(report: &[u8]) {
    let mut report = Report(report);
    let mut leaf = || [report.dword(), report.dword(), report.dword(), report.dword()];
    assert_eq!(leaf(), [0x4000_000a, 0x756e_694c, 0x564b_2078, 0x7648_204d], "Linux KVM Hv");
    assert_eq!(leaf(), [u32::from_le_bytes(*b"Hv#1"), 0, 0, 0]);
    assert_eq!(leaf(), [0x3839, 0xa_0000, 0, 0]);
    assert_eq!(leaf(), [0x20e, 0, 0, 8]);
    assert_eq!(leaf(), [0x20, 0, 0, 0]);
    (5..=10).for_each(|n| assert_eq!(leaf(), [0; 4], "leaf {n}"));
    assert_eq!([report.dword(), report.dword()], [ACCESS_DENIED, 0]);
}

/// A guest gets messages of a timer, is saved while it waits for one, and gets that and later ones after a restore.
#[rstest]
#[case::copied("Copy")]
#[case::on_demand("OnDemand")]
fn a_guest_of_hyperv_takes_timer_messages_across_a_restore(#[case] mode: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| -> PathBuf { folder.path().join(name) };
    fs::write(path("kernel"), files::kernel(&tiny())).unwrap();
    let (api, vmm) = start("first");
    let config = json!({
        "payload": {"kernel": path("kernel")}, "cpus": {"boot_vcpus": 2, "max_vcpus": 2, "kvm_hyperv": true},
        "memory": {"size": 32 << 20}, "console": {"mode": "Off"},
        "serial": {"mode": "File", "file": path("before")},
    });
    assert_eq!(api.put_json("vm.create", &config).status, 204);
    let answer = api.put("vm.boot");
    assert_eq!(answer.status, 204, "{}", answer.body);
    assert_eq!(api.info()["config"]["cpus"]["kvm_hyperv"], true);
    reports(&path("before"), FIRST + 3 * LATER);
    assert_eq!(api.put("vm.pause").status, 204);
    let saved = save(&api, &path("a"));
    vmm.signal(libc::SIGKILL);
    let bytes = fs::read(path("before")).unwrap();
    let (first, turns) = bytes.split_at(FIRST);
    check_first(first);
    let last = turns.chunks_exact(LATER).fold(0, |time, turn| check_turn(turn, time));

    let set = |vcpu: usize, index: u32| {
        let msrs = saved["vcpus"][vcpu]["msrs"].as_array().unwrap();
        let found = msrs.iter().find(|msr| msr[0] == index).unwrap_or_else(|| panic!("{index:#x}"));
        // Integers beyond 53 bits are strings.
        found[1].as_u64().unwrap_or_else(|| found[1].as_str().unwrap().strip_prefix("int:").unwrap().parse().unwrap())
    };
    let page = |address: u32| u64::from(address | 1);
    let expected = [
        (GUEST_OS_ID, u64::from(IDENTITY) << 32 | 1),
        (HYPERCALL, page(HYPERCALLS)),
        (REFERENCE_TSC, page(TIME_PAGE)),
        (SCONTROL, 1),
        (SIEFP, page(EVENTS)),
        (SIMP, page(MESSAGES)),
        (SINT2, VECTOR.into()),
    ];
    expected.into_iter().for_each(|(index, value)| assert_eq!(set(0, index), value, "{index:#x}"));
    assert_ne!((set(0, STIMER0_CONFIG), set(0, STIMER0_COUNT)), (0, 0));
    assert_eq!(
        [SCONTROL, SIMP, STIMER0_COUNT, SINT2].map(|index| set(1, index)),
        [1, 0, 0, 1 << 16],
        "as KVM has them"
    );

    redirect(&path("a"), &path("after"));
    let (api, vmm) = start("second");
    let url = format!("file://{}", path("a").display());
    let answer = api.put_json("vm.restore", &json!({"source_url": url, "memory_restore_mode": mode}));
    assert_eq!(answer.status, 204, "{}", answer.body);
    assert_eq!(save(&api, &path("b")), saved);
    assert_eq!(api.put("vm.resume").status, 204);
    // The rest of an interrupted report, and complete ones.
    let begun = turns.len() % LATER;
    let bytes = reports(&path("after"), 4 * LATER);
    let (rest, turns) = bytes.split_at(if begun == 0 { 0 } else { LATER - begun });
    assert!(rest.len() < LATER);
    turns.chunks_exact(LATER).fold(last, |time, turn| check_turn(turn, time));
    // The guest's hypervisor cannot change.
    let (other, _vmm) = start("third");
    let config = path("a").join("config.json");
    let edited = fs::read_to_string(&config).unwrap().replace(r#""kvm_hyperv":true"#, r#""kvm_hyperv":false"#);
    fs::write(config, edited).unwrap();
    let refused = other.put_json("vm.restore", &json!({"source_url": url}));
    assert!(refused.status == 400 && refused.body.to_string().contains("cpus.kvm_hyperv: false"), "{}", refused.body);
    assert_eq!(vmm.errors(), "", "the VMM printed no errors");
}

/// The frequency of this machine's time stamp counter in kHz, as measured by Linux.
fn tsc_khz() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap();
    let line = text.lines().find(|line| line.starts_with("cpu MHz")).unwrap();
    line.split_once(": ").unwrap().1.replace('.', "")
}

fn mac(tap: &HostTap) -> String {
    fs::read_to_string(format!("/sys/class/net/{}/address", tap.name())).unwrap().trim().to_string()
}

fn ping(guest: &mut Guest, vfs: &[Vf]) {
    for vf in vfs {
        guest.ping(vf.interface(), Subnet(vf.index as u8));
    }
}

/// Linux finds neither hypervisor, and has no clock of one: the test gives it the frequency of its counter.
#[test]
fn linux_with_hyperv_has_vfs_and_resumes_from_a_snapshot() {
    let api = Api::new("linux");
    let spec = spec_with_vfs(Kernel::V6_12, 2).hyperv().memory("size=512M");
    let spec = spec.kernel_argument(&format!("tsc_early_khz={} tsc=reliable", tsc_khz()));
    let mut guest = Guest::boot(spec.arguments(&["--api-socket", &api.argument()]));
    println!("{}", guest.ok("dmesg | grep -i -e hyper -e tsc -e clocksource"));
    assert_eq!(guest.run("dmesg | grep 'Hypervisor detected'").text, "");
    guest.ok("grep -q hypervisor /proc/cpuinfo");
    let pf = Pf::find(&mut guest);
    pf.set_num_vfs(&mut guest, 2);
    let (vfs, taps) = (pf.vfs(&mut guest), vf_taps(2));
    for (vf, tap) in vfs.iter().zip(&taps) {
        tap.join(Subnet(vf.index as u8));
        guest.join(vf.interface(), Subnet(vf.index as u8));
    }
    ping(&mut guest, &vfs);
    let macs: Vec<_> = taps.iter().map(mac).collect();
    let known = guest.ok("cat /proc/sys/kernel/random/boot_id");

    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("a");
    assert_eq!(api.put("vm.pause").status, 204);
    save(&api, &saved);
    assert_eq!(guest.stop_by(libc::SIGKILL).code, None);
    let api = Api::new("again");
    let keys = format!("source_url=file://{}", saved.display());
    let command = VmmCommand::new().args(["--restore", &keys, "--api-socket", &api.argument()]);
    let mut guest = Guest::restored_by(command);
    assert_eq!(api.info()["state"], "Paused");
    for ((tap, mac), index) in vf_taps(2).iter().zip(&macs).zip(0..) {
        // The guest's neighbours keep their addresses.
        let set = Command::new("ip").args(["link", "set", tap.name(), "address", mac]).status();
        assert!(set.unwrap().success());
        tap.join(Subnet(index));
    }
    assert_eq!(api.put("vm.resume").status, 204);
    assert_eq!(guest.ok("cat /proc/sys/kernel/random/boot_id"), known);
    ping(&mut guest, &vfs);
    vfs.iter().for_each(|vf| guest.transfer(Subnet(vf.index as u8), 64 << 10));
    guest.assert_kernel_has_no_complaint();
    assert_eq!(guest.vmm().errors(), "", "the VMM printed no errors");
    assert_eq!(guest.power_off().code, Some(0));
}

/// Moves all of the guest's memory, which contains no KVM clock.
#[test]
fn linux_with_hyperv_and_vfs_moves_to_another_vmm_and_back() {
    const KINDS: [Backend; 2] = [Backend::Tap, Backend::VhostUser];
    let [here, there] = ["a", "b"].map(|name| Plan::new(name, &KINDS));
    let bridge = |index: usize| {
        let ports = [format!("a{index}"), format!("b{index}")];
        Bridge::new(&format!("br{index}"), Subnet(index as u8), &ports.each_ref().map(String::as_str))
    };
    let _bridges: Vec<_> = (0..KINDS.len()).map(bridge).collect();
    let clock = format!("tsc_early_khz={} tsc=reliable", tsc_khz());
    let mut here = here.boot(Kernel::V6_12, |spec| spec.hyperv().memory("size=512M").kernel_argument(&clock));
    let mut there = there.wait(&[]);
    let pf = Pf::find(&mut here.guest);
    pf.set_num_vfs(&mut here.guest, KINDS.len());
    let vfs = pf.vfs(&mut here.guest);
    for vf in &vfs {
        let subnet = Subnet(vf.index as u8);
        here.guest.join(vf.interface(), subnet);
        here.guest.wait_for(&format!("ping -c 1 -W 1 -I {} {}", vf.interface(), subnet.host()));
    }
    let known = here.guest.ok("cat /proc/sys/kernel/random/boot_id");
    let mut stream = Stream::open(&mut here.guest, Subnet(0));
    for round in ["there\n", "back\n"] {
        let (_, differing) = here.move_compared_to(&there, &json!({}));
        assert_eq!(differing, []);
        (here, there) = (there, here);
        stream.assert_alive(round.as_bytes());
        assert_eq!(here.api.info()["config"]["cpus"]["kvm_hyperv"], true);
        assert_eq!(here.guest.ok("cat /proc/sys/kernel/random/boot_id"), known);
        for vf in &vfs {
            here.guest.ping(vf.interface(), Subnet(vf.index as u8));
            here.guest.transfer(Subnet(vf.index as u8), 64 << 10);
        }
    }
    here.guest.assert_kernel_has_no_complaint();
    for site in [&here, &there] {
        assert_eq!(site.guest.vmm().errors(), "", "the VMM printed no errors");
    }
}
