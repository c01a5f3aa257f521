//! Pings from the host, which show how long a guest did not answer.

use std::mem::MaybeUninit;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::host::tap::Subnet;

/// The identifier of the first address's echo requests.
const FIRST: u16 = 0x5a00;

/// Pings from the host to several addresses of a guest, until they are ended.
pub struct Probes {
    stop: Arc<AtomicBool>,
    forgets: Arc<AtomicBool>,
    /// Number of pings that each address has answered.
    counts: Arc<[AtomicU64]>,
    thread: JoinHandle<Vec<Answers>>,
}

/// Answers from an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Answers {
    /// Pings that were answered.
    pub answered: u64,
    /// The longest time between two answers.
    pub gap: Duration,
}

struct Address {
    subnet: Subnet,
    last: Instant,
    answers: Answers,
}

impl Probes {
    /// Pings the guest's address in each of `subnets` every `pause`.
    pub fn start(subnets: &[Subnet], pause: Duration) -> Probes {
        let [stop, forgets] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let (stopped, forgotten, socket, now) = (Arc::clone(&stop), Arc::clone(&forgets), raw_socket(), Instant::now());
        let counts: Arc<[AtomicU64]> = subnets.iter().map(|_| AtomicU64::new(0)).collect();
        let counted = Arc::clone(&counts);
        let address = |subnet: &Subnet| Address { subnet: *subnet, last: now, answers: Answers::default() };
        let mut addresses: Vec<_> = subnets.iter().map(address).collect();
        let thread = thread::spawn(move || {
            let mut sequence = 0_u16;
            while !stopped.load(Ordering::Relaxed) {
                sequence = sequence.wrapping_add(1);
                if forgotten.swap(false, Ordering::Relaxed) {
                    addresses.iter_mut().for_each(|address| address.answers = Answers::default());
                }
                for (index, address) in addresses.iter().enumerate() {
                    send(&socket, address.subnet.guest(), &request(FIRST + index as u16, sequence));
                }
                let next = Instant::now() + pause;
                while let Some(left) = next.checked_duration_since(Instant::now()) {
                    receive(&socket, left, &mut addresses, &counted);
                }
            }
            // Silence at the end counts as well.
            addresses.iter_mut().for_each(|address| address.note());
            addresses.into_iter().map(|address| address.answers).collect()
        });
        Probes { stop, forgets, counts, thread }
    }

    /// Waits up to `limit` until each address has answered once more.
    pub fn await_answers(&self, limit: Duration) {
        let now = || self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect::<Vec<_>>();
        let (before, end) = (now(), Instant::now() + limit);
        while now().iter().zip(&before).any(|(now, before)| now == before) && Instant::now() < end {
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Resets the counts.
    pub fn forget(&self) {
        self.forgets.store(true, Ordering::Relaxed);
    }

    /// Ends the pings. Returns the answers of each address, in their order.
    pub fn end(self) -> Vec<Answers> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the pings can be sent")
    }
}

impl Address {
    fn note(&mut self) {
        let now = Instant::now();
        self.answers.gap = self.answers.gap.max(now - self.last);
        self.last = now;
    }
}

/// Records the answers that arrive within `left`.
fn receive(socket: &OwnedFd, left: Duration, addresses: &mut [Address], counts: &[AtomicU64]) {
    let mut wait = libc::pollfd { fd: socket.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: it is one pollfd.
    if unsafe { libc::poll(&raw mut wait, 1, left.as_millis() as libc::c_int + 1) } <= 0 {
        return;
    }
    loop {
        let mut packet = [MaybeUninit::<u8>::uninit(); 128];
        // SAFETY: the buffer has the given length.
        let len =
            unsafe { libc::recv(socket.as_raw_fd(), packet.as_mut_ptr().cast(), packet.len(), libc::MSG_DONTWAIT) };
        let Ok(len) = usize::try_from(len) else { return };
        // SAFETY: this number of bytes was written.
        let packet: Vec<u8> = packet[..len].iter().map(|byte| unsafe { byte.assume_init() }).collect();
        // An IPv4 header of 20 bytes; an echo reply has the type 0.
        let Some([0, _, _, _, high, low, ..]) = packet.get(20..) else { continue };
        let index = usize::from(u16::from_be_bytes([*high, *low]).wrapping_sub(FIRST));
        if let Some((address, count)) = addresses.get_mut(index).zip(counts.get(index)) {
            count.fetch_add(1, Ordering::Relaxed);
            address.answers.answered += 1;
            address.note();
        }
    }
}

/// An echo request (RFC 792).
fn request(id: u16, sequence: u16) -> Vec<u8> {
    let mut words = [0x0800, 0, id, sequence];
    let sum: u32 = words.iter().map(|word| u32::from(*word)).sum();
    words[1] = !(((sum & 0xffff) + (sum >> 16)) as u16);
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn send(socket: &OwnedFd, to: Ipv4Addr, message: &[u8]) {
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        sin_addr: libc::in_addr { s_addr: u32::from(to).to_be() },
        sin_zero: [0; 8],
    };
    let length = size_of_val(&address) as libc::socklen_t;
    // SAFETY: message and address have the given lengths. A failed send counts as lost, as on a wire.
    unsafe {
        libc::sendto(
            socket.as_raw_fd(),
            message.as_ptr().cast(),
            message.len(),
            libc::MSG_DONTWAIT,
            (&raw const address).cast(),
            length,
        )
    };
}

fn raw_socket() -> OwnedFd {
    // SAFETY: socket has no memory effects.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::IPPROTO_ICMP) };
    assert!(fd >= 0, "a raw socket: {}", std::io::Error::last_os_error());
    // SAFETY: the descriptor was just opened and has no other owner.
    unsafe { OwnedFd::from_raw_fd(fd) }
}
