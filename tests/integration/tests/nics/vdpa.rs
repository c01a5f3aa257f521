//! A NIC over one of the kernel's vDPA devices, served by the VDUSE fixture. The test is the NIC's driver.
//! `backends.rs` tests guests with such NICs.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fixtures::process::Process;
use virtio_devices::{
    BackendChange, GuestMap, HostNic, Interrupts, Memory, Net, NetSpec, Start, Vdpa, VdpaError, VdpaSpec, VirtioDevice,
    Worker,
};
use vm_memory::{FileOffset, GuestAddress, GuestAddressSpace};

use crate::driver::{BUFFERS, DriverQueue, MEMORY, WRITE, eventually};

const RECEIVE: usize = 0;
const TRANSMIT: usize = 1;
const SIZE: u16 = 64;
/// `VIRTIO_F_VERSION_1` and `VIRTIO_NET_F_STATUS`.
const FEATURES: u64 = 1 << 32 | 1 << 16;
const MAC: [u8; 6] = [0x52, 0x54, 0, 0, 0, 0x77];
/// The size of a frame's virtio-net header.
const HEADER: usize = 12;
/// Interval at which the VMM checks that a running device responds, plus a margin.
const PULSE: Duration = Duration::from_secs(7);

/// Guest memory that can be shared with another process.
fn shared_memory() -> GuestMap {
    let file: File = tempfile::tempfile_in("/dev/shm").or_else(|_| tempfile::tempfile()).unwrap();
    file.set_len(MEMORY).unwrap();
    let range = (GuestAddress(0), MEMORY as usize, Some(FileOffset::new(file, 0)));
    GuestMap::from_ranges_with_files([range]).unwrap()
}

fn open(path: &Path, memory: &Memory) -> Result<Vdpa, VdpaError> {
    Vdpa::open(VdpaSpec { path: path.into(), mac: None, queue_pairs: 1 }, memory)
}

/// Sets the device's `msg_timeout`: the number of seconds that the kernel waits for a silent VDUSE process.
fn set_message_limit(name: &str, seconds: u32) {
    std::fs::write(format!("/sys/class/vduse/{name}/msg_timeout"), seconds.to_string()).unwrap();
}

fn device(name: &str) -> String {
    format!("name={name},ip=10.77.0.1,mac=52:54:00:00:00:77,mtu=1400")
}

/// A NIC over a vDPA device, and its driver.
struct Machine {
    net: Net,
    queues: Vec<DriverQueue>,
    workers: Vec<Worker>,
    interrupts: Arc<Interrupts>,
    memory: Memory,
    frames: u64,
}

impl Machine {
    fn over(path: &Path) -> Self {
        let memory = Memory::new(shared_memory());
        let vdpa = open(path, &memory).unwrap_or_else(|error| panic!("{error}"));
        let net = NetSpec { queue_size: SIZE, ..NetSpec::new("_net0", [2, 0, 0, 0, 0, 1]) };
        let net = Net::new(net, vdpa).unwrap();
        let interrupts = Arc::new(Interrupts::new(3, 4));
        [0, 1].into_iter().for_each(|queue| interrupts.set_queue_vector(queue, queue));
        interrupts.set_config_vector(3);
        let mut machine = Self { net, queues: Vec::new(), workers: Vec::new(), interrupts, memory, frames: 0 };
        machine.renew();
        machine
    }

    /// Makes the driver set up its queues again after a reset.
    fn renew(&mut self) {
        let memory = GuestMap::clone(&self.memory.memory());
        self.queues = (0..2).map(|index| DriverQueue::new(&memory, index, SIZE)).collect();
        self.queues[0].memory_write(0, &vec![0; BUFFERS as usize]);
        self.frames = 0;
    }

    fn start(&mut self) {
        let queues = self.queues.iter().enumerate().map(|(i, q)| (i as u16, Arc::clone(&q.queue))).collect();
        let interrupts = Arc::clone(&self.interrupts);
        self.workers = self
            .net
            .start(Start { memory: self.memory.clone().into(), features: FEATURES, queues, interrupts, log: None })
            .unwrap();
    }

    fn stop(&mut self) {
        self.workers.drain(..).for_each(|worker| worker.stop().join().unwrap());
    }

    fn reset(&mut self) {
        self.stop();
        self.net.reset();
        self.renew();
    }

    fn kick(&self, queue: usize) {
        let mut doorbells = self.workers.iter().flat_map(|worker| &worker.doorbells);
        doorbells.find(|(index, _)| usize::from(*index) == queue).unwrap().1.write(1).unwrap();
    }

    /// Sends an ARP request to the fixture.
    fn ask(&mut self) {
        self.frames += 1;
        let at = BUFFERS + self.frames % 64 * 4096;
        self.queues[RECEIVE].add(&[(at, 2048, WRITE)]);
        self.kick(RECEIVE);
        let request = arp_request();
        self.queues[TRANSMIT].send(at + 2048, &request, &[]);
        self.kick(TRANSMIT);
    }

    /// Asserts that the request of [`Machine::ask`] is answered.
    fn expect_answer(&mut self) {
        let at = BUFFERS + self.frames % 64 * 4096;
        eventually("the frame's transmission", || !self.queues[TRANSMIT].take_used().is_empty());
        let mut taken = Vec::new();
        eventually("an answer", || {
            taken.extend(self.queues[RECEIVE].take_used());
            !taken.is_empty()
        });
        let answer = self.queues[RECEIVE].bytes(at + HEADER as u64, 42);
        assert_eq!((taken.len(), &answer[..6]), (1, &MAC[..]), "one frame, sent to the asker");
        assert_eq!((&answer[20..22], &answer[28..32]), (&[0, 2][..], &[10, 77, 0, 1][..]), "a reply by the fixture");
        let vector = self.interrupts.eventfd(0).unwrap();
        eventually("an interrupt", || vector.read().is_ok());
    }

    fn exchange(&mut self) {
        self.ask();
        self.expect_answer();
    }

    fn config_interrupts(&self) -> u64 {
        self.interrupts.eventfd(3).unwrap().read().unwrap_or(0)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.stop();
    }
}

fn arp_request() -> Vec<u8> {
    let head: [&[u8]; 4] = [&[0; HEADER], &[0xff; 6], &MAC, &[0x08, 0x06, 0, 1, 8, 0, 6, 4, 0, 1]];
    let body: [&[u8]; 4] = [&MAC, &[10, 77, 0, 2], &[0; 6], &[10, 77, 0, 1]];
    [head.concat(), body.concat()].concat()
}

/// G61: starts, stops and resets issue no IOTLB update.
#[test]
fn frames_pass_after_each_start_without_any_iotlb_update() {
    let mut fixture = Process::vduse_net(&[&device("own")]);
    let mut machine = Machine::over(&fixture.node("own"));
    assert_eq!(HostNic::mac(&machine.net), MAC, "the NIC has the device's address");
    let mut mtu = [0; 2];
    machine.net.config_read(10, &mut mtu);
    assert_eq!(u16::from_le_bytes(mtu), 1400);
    let mapped = fixture.count("own", "iotlb_updates");
    assert_eq!(mapped, 1, "all memory is mapped in one batch");
    for _ in 0..5 {
        machine.start();
        machine.exchange();
        machine.reset();
    }
    // Start again without a reset: the rings continue where they stopped.
    machine.start();
    machine.exchange();
    machine.stop();
    machine.start();
    machine.exchange();
    assert_eq!(fixture.count("own", "iotlb_updates"), mapped);
    assert_eq!(fixture.count("own", "from_guest"), 7);
}

#[test]
fn the_nic_follows_the_link_of_its_device() {
    let mut fixture = Process::vduse_net(&[&device("wire")]);
    let mut machine = Machine::over(&fixture.node("wire"));
    machine.start();
    machine.exchange();
    machine.config_interrupts();
    fixture.command("link down wire");
    eventually("link down", || !machine.net.link_up());
    eventually("a configuration interrupt", || machine.config_interrupts() > 0);
    fixture.command("link up wire");
    eventually("link up", || machine.net.link_up());
    // A reset ends the kernel's notifications of changes. The next start requests them again.
    machine.reset();
    machine.start();
    machine.exchange();
    fixture.command("link down wire");
    eventually("link down after a reset", || !machine.net.link_up());
    assert!(!machine.net.backend_lost());
}

#[test]
fn a_device_of_a_killed_process_is_lost_and_restored_on_return() {
    let fixture = Process::vduse_net(&[&device("gone")]);
    let node = fixture.node("gone");
    let mut machine = Machine::over(&node);
    let changes = Arc::new(parking_lot::Mutex::new(Vec::new()));
    let told = Arc::clone(&changes);
    machine.net.observe_backend(Box::new(move |change| told.lock().push(change)));
    machine.start();
    machine.exchange();
    machine.config_interrupts();
    set_message_limit("gone", 2);
    let killed = Instant::now();
    fixture.kill();
    await_lost(&machine, PULSE + Duration::from_secs(20));
    println!("noticed after {:?}", killed.elapsed());
    assert!(!machine.net.link_up());
    // The worker signals the driver only after it has recorded the loss.
    eventually("a configuration interrupt", || machine.config_interrupts() > 0);
    machine.ask();
    // The VMM has closed the lost device, so the fixture can remove it before it creates it again.
    let fixture = Process::vduse_net(&[&device("gone")]);
    assert_eq!(fixture.node("gone"), node);
    eventually("the device's return", || !machine.net.backend_lost());
    machine.expect_answer();
    machine.exchange();
    assert_eq!(*changes.lock(), [BackendChange::Lost, BackendChange::Restored]);
    // A device can only be removed while no program has it open.
    drop(machine);
}

#[test]
fn a_process_that_takes_the_device_over_in_time_goes_unnoticed() {
    let fixture = Process::vduse_net(&[&device("heir")]);
    let mut machine = Machine::over(&fixture.node("heir"));
    machine.start();
    machine.exchange();
    fixture.kill();
    // Long enough for the VMM to have checked that the device responds.
    std::thread::sleep(PULSE);
    let _fixture = Process::vduse_net(&["--take-over", &device("heir")]);
    machine.exchange();
    assert!(!machine.net.backend_lost() && machine.net.link_up());
    // A device can only be removed while no program has it open.
    drop(machine);
}

#[test]
fn a_reset_without_a_reply_ends_at_the_kernels_limit() {
    let fixture = Process::vduse_net(&[&device("mute")]);
    let mut machine = Machine::over(&fixture.node("mute"));
    machine.start();
    machine.exchange();
    set_message_limit("mute", 1);
    fixture.kill();
    let asked = Instant::now();
    machine.reset();
    assert!(asked.elapsed() < Duration::from_secs(25), "{:?}", asked.elapsed());
    machine.start();
    await_lost(&machine, Duration::from_secs(60));
}

fn await_lost(machine: &Machine, limit: Duration) {
    let start = Instant::now();
    while !machine.net.backend_lost() {
        assert!(start.elapsed() < limit, "the device was not lost in time");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_refusal_by_the_kernel_is_reported_in_one_line() {
    let fixture = Process::vduse_net(&[&device("user"), &device("small")]);
    let memory = Memory::new(shared_memory());
    let told = |path: &Path, memory: &Memory| open(path, memory).err().expect("the device is refused").to_string();
    let node = fixture.node("user");
    let first = open(&node, &memory).unwrap_or_else(|error| panic!("{error}"));
    let error = told(&node, &memory);
    assert!(error.starts_with(&format!("vdpa={}: the device is in use", node.display())), "{error}");
    drop(first);
    drop(open(&node, &memory).unwrap_or_else(|error| panic!("a closed device can be opened again: {error}")));
    let error = told(&PathBuf::from("/dev/vhost-vdpa-99"), &memory);
    assert!(error.contains("no such device"), "{error}");
    let error = told(Path::new("/dev/null"), &memory);
    assert!(error.contains("not a vhost-vdpa device"), "{error}");
    let private = GuestMap::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).unwrap();
    let error = told(&node, &Memory::new(private));
    assert!(error.contains("add shared=on to --memory"), "{error}");
    let spec = |mac, queue_pairs| VdpaSpec { path: node.clone(), mac, queue_pairs };
    let error = Vdpa::open(spec(None, 2), &memory).err().unwrap().to_string();
    assert!(error.contains("num_queues=4: the device has 1 pair(s) of queues"), "{error}");
    let error = Vdpa::open(spec(Some([2, 0, 0, 0, 0, 5]), 1), &memory).err().unwrap().to_string();
    assert!(error.contains("mac=02:00:00:00:00:05: the device has the address 52:54:00:00:00:77"), "{error}");
}

#[test]
fn a_process_that_never_answers_fails_at_the_kernels_limit() {
    let fixture = Process::vduse_net(&["--never-answer", &device("still")]);
    set_message_limit("still", 1);
    let error = open(&fixture.node("still"), &Memory::new(shared_memory())).err().unwrap().to_string();
    assert!(error.contains("the device does not answer"), "{error}");
}

#[test]
fn thirty_two_devices_run_at_once() {
    let names: Vec<String> = (0..32).map(|index| format!("many{index}")).collect();
    let devices: Vec<String> = names.iter().map(|name| device(name)).collect();
    let mut fixture = Process::vduse_net(&devices.iter().map(String::as_str).collect::<Vec<_>>());
    let opened = Instant::now();
    let mut machines: Vec<_> = names.iter().map(|name| Machine::over(&fixture.node(name))).collect();
    println!("32 devices opened in {:?}", opened.elapsed());
    let started = Instant::now();
    machines.iter_mut().for_each(Machine::start);
    machines.iter_mut().for_each(Machine::exchange);
    println!("32 devices started, a frame each way, in {:?}", started.elapsed());
    machines.iter_mut().for_each(Machine::reset);
    for name in &names {
        assert_eq!(fixture.count(name, "iotlb_updates"), 1, "{name}");
    }
}
