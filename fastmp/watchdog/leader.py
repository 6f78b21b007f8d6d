"""Node leader: sends the heartbeats of the ranks of its machine to the job's store."""

from __future__ import annotations

import json

from fastmp.watchdog.channel import INVESTIGATE, Channel
from fastmp.watchdog.heartbeat import essence, message_spacing, node_message, pack
from fastmp.watchdog.node import Node

__all__ = ["Leader"]


class Leader:
    """Sender of the messages of a machine, and state of the last one.

    asked: when a rank of the job was last seen to investigate a hang. While one does, messages are sent as
    they change, and the ranks of this machine include their collectives.
    """

    def __init__(self, node: Node, channel: Channel, world_size: int, interval: float) -> None:
        self.node, self.channel, self.world_size, self.interval = node, channel, world_size, interval
        self.asked = -1e9
        self._message, self._groups, self._sent = "", "", -1e9
        self._version = self._groups_version = 0

    def send(self, beat: int, now: float, last: bool) -> None:
        """Send the message of this machine if it is due; always if it is the `last` one of this rank.

        beat: number of the heartbeat of this rank.
        """
        node, channel, rank = self.node, self.channel, self.node.rank
        beats = node.hear(node.ranks(), now)
        if any(each.content["investigating"] for each in beats.values()):
            channel.send(INVESTIGATE, f"{rank} {beat}")
            self.asked = now
        self.asked = max(self.asked, channel.asked)
        if now - self.asked < node.silence:
            node.post("asked", f"{self.asked}")
        elif not last and now - self._sent < message_spacing(self.interval, self.world_size // len(beats)):
            return
        groups = json.dumps({of: each.content["record"]["groups"] for of, each in beats.items()})
        if groups != self._groups:
            self._groups, self._groups_version = groups, self._groups_version + 1
            channel.send(f"groups-{rank}", pack(json.loads(groups)))
        sent = node_message({of: (e.content, node.state(e, now), now - e.since) for of, e in beats.items()})
        known, is_new = essence(sent), self._version == 0
        if known != self._message:
            self._message, self._sent, self._version = known, now, self._version + 1
            channel.send(f"message-{rank}", pack(sent))
        channel.send(f"beat-{rank}", f"{beat} {self._version} {self._groups_version} {now - self._sent:.1f}")
        if is_new:
            channel.send(f"calls-{rank}", b"")
            channel.lead(rank)

    def send_calls(self) -> None:
        """Send the collectives that the ranks of this machine have left for the comparison."""
        texts = [self.node.read(f"calls-{rank}") for rank in self.node.ranks()]
        self.channel.send(f"calls-{self.node.rank}", pack([json.loads(text) for text in texts if text]))
