/* ddp_data.h */
