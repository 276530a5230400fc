"""Numerics that methods share: functions of tensors, without state and without communication."""
