//! The backend channel, on which the peer sends requests to this process.

use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;

use super::connection::receive;
use super::message::{CONFIG_CHANGE, HEADER, Header, IOTLB, MAX_ANSWER, NEED_REPLY, REPLY, longs};
use crate::backend::iotlb::Miss;

/// Our end of the channel.
#[derive(Debug)]
pub(crate) struct Channel(UnixStream);

/// A message on the channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChannelMessage {
    /// Nothing that matters here.
    Nothing,
    /// The device configuration has changed.
    ConfigChange,
    /// The peer asks for a translation.
    Miss(Miss),
    /// The peer has closed its end, or sent something malformed.
    End,
}

impl Channel {
    /// A channel, and the peer's end of it.
    pub(crate) fn new() -> std::io::Result<(Self, UnixStream)> {
        let (near, far) = UnixStream::pair()?;
        near.set_nonblocking(true)?;
        Ok((Self(near), far))
    }

    /// Receives one request, if there is one, and answers it.
    pub(crate) fn hear(&mut self) -> ChannelMessage {
        let mut header = [0; HEADER];
        match self.read(&mut header) {
            Ok(HEADER) => {}
            Err(Errno::AGAIN | Errno::INTR) => return ChannelMessage::Nothing,
            _ => return ChannelMessage::End,
        }
        let Some(header) = Header::parse(header).filter(|header| header.len as usize <= MAX_ANSWER) else {
            return ChannelMessage::End;
        };
        let mut payload = vec![0; header.len as usize];
        if !payload.is_empty() && self.read(&mut payload) != Ok(payload.len()) {
            return ChannelMessage::End;
        }
        let heard = match header.request {
            CONFIG_CHANGE => ChannelMessage::ConfigChange,
            IOTLB => Miss::parse(&payload).map_or(ChannelMessage::Nothing, ChannelMessage::Miss),
            _ => ChannelMessage::Nothing,
        };
        if header.flags & NEED_REPLY != 0 {
            let answer = Header { flags: REPLY, len: 8, ..header };
            let refused = u64::from(heard == ChannelMessage::Nothing);
            // A miss counts as accepted: the peer may have to process its answer while it waits for this. A peer that
            // does not read its answers gets none.
            let _ = self.0.write(&[answer.bytes(), longs(&[refused])].concat());
        }
        heard
    }

    /// Descriptors with a message are closed: none of the known requests has any.
    fn read(&self, bytes: &mut [u8]) -> Result<usize, Errno> {
        receive(self.0.as_fd(), bytes, &mut None)
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn heard(messages: &[u8]) -> (Vec<ChannelMessage>, Vec<u8>) {
        let (mut channel, mut peer) = Channel::new().unwrap();
        peer.write_all(messages).unwrap();
        peer.shutdown(std::net::Shutdown::Write).unwrap();
        let mut heard = Vec::new();
        while heard.last() != Some(&ChannelMessage::End) {
            heard.push(channel.hear());
        }
        drop(channel);
        let mut answers = Vec::new();
        peer.read_to_end(&mut answers).unwrap();
        (heard, answers)
    }

    fn request(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
        [Header { request, flags, len: payload.len() as u32 }.bytes(), payload.to_vec()].concat()
    }

    #[test]
    fn a_config_change_is_received_and_acknowledged_if_requested() {
        let (told, answers) = heard(&[request(2, 0, &[]), request(2, NEED_REPLY, &[])].concat());
        assert_eq!(told, [ChannelMessage::ConfigChange, ChannelMessage::ConfigChange, ChannelMessage::End]);
        assert_eq!(answers, [request(2, REPLY, &[0; 8])].concat());
    }

    #[test]
    fn another_request_is_refused_where_an_answer_is_wanted() {
        let (told, answers) = heard(&[request(6, 0, &[1; 16]), request(6, NEED_REPLY, &[1; 16])].concat());
        assert_eq!(told, [ChannelMessage::Nothing, ChannelMessage::Nothing, ChannelMessage::End]);
        assert_eq!(answers, request(6, REPLY, &[1, 0, 0, 0, 0, 0, 0, 0]));
    }

    #[test]
    fn an_iotlb_miss_is_parsed_and_an_invalid_one_is_refused() {
        let mut miss = [0; 32];
        miss[..2].copy_from_slice(&[0x22, 0x11]);
        miss[24..26].copy_from_slice(&[2, 1]);
        let asked = ChannelMessage::Miss(Miss { address: 0x1122, access: vm_memory::Permissions::Write });
        let (told, answers) = heard(&[request(1, NEED_REPLY, &miss), request(1, 0, &miss[..26])].concat());
        assert_eq!(told, [asked, asked, ChannelMessage::End]);
        assert_eq!(answers, request(1, REPLY, &[0; 8]));
        let (told, answers) = heard(&request(1, NEED_REPLY, &miss[..20]));
        assert_eq!((told, answers[12]), (vec![ChannelMessage::Nothing, ChannelMessage::End], 1));
    }

    #[test]
    fn a_malformed_message_ends_the_channel() {
        let too_long = Header { request: 2, flags: 0, len: 1 << 20 }.bytes();
        let cut_off = &request(2, 0, &[1; 16])[..20];
        for nonsense in [&[0; HEADER][..], &too_long, cut_off, &[1; 5]] {
            assert_eq!(heard(nonsense).0, [ChannelMessage::End], "{nonsense:?}");
        }
    }

    #[test]
    fn nothing_to_hear_is_no_end() {
        let (mut channel, _peer) = Channel::new().unwrap();
        assert_eq!(channel.hear(), ChannelMessage::Nothing);
    }
}
